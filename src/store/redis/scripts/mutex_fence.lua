-- Prelude of the scripts that make a token the holder of a mutex.
--
-- Each function is made anew at every call, and each command in a script costs a third of a call; so
-- there are few of both on the way of those who contend.
--
-- KEYS: mutex, queue, fence
-- calls: set incr time

-- A number that is greater than all given for this mutex before: counted on for as long as that is within
-- 10 ms of the clock, in microseconds, or ahead of it, and the clock otherwise. Counted alone, numbers would be
-- given again by a server that has lost its latest writes, as one that is promoted may have; the clock alone may be
-- set back. What is counted is kept for a day by the clock, which is past it then.
local function next_fence()
  local fence = redis.pcall('INCR', KEYS[3])
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  -- Foreign data where the count should be is left alone; the clock has to do.
  if type(fence) ~= 'number' then
    return now
  end
  if fence + 10000 > now then
    return fence
  end
  redis.call('SET', KEYS[3], string.format('%.0f', now), 'PX', 86400000)
  return now
end

local function give(token, ttl)
  if ttl == '0' then
    redis.call('SET', KEYS[1], token)
  else
    redis.call('SET', KEYS[1], token, 'PX', ttl)
  end
end

