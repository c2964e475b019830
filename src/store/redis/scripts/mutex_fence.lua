-- Prelude of the scripts that make a token the holder of a mutex.
--
-- Lua creates each function anew at every call, and each command in a script costs a third of a call; so the path
-- of contending callers has few functions and few commands.
--
-- KEYS: mutex, queue, fence
-- calls: set incr time

-- Returns a number that is greater than all earlier fences of this mutex. It increments the stored count while the
--         count is at most 10 ms behind the clock (in microseconds) or ahead of it; otherwise it takes the clock. A
--         count alone would repeat numbers on a server that has lost its latest writes, such as a promoted replica;
--         the clock alone may be set back. A count that was taken from the clock expires after a day: by then the
--         clock is ahead of it.
local function next_fence()
  local fence = redis.pcall('INCR', KEYS[3])
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  -- Foreign data in place of the count is left alone, and the fence is the clock.
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

