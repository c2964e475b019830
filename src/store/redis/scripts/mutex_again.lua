-- Prelude of the scripts that take a mutex for a token that may hold it already.
--
-- KEYS: mutex, queue, fence
-- calls: get set incr time pexpire

-- Restarts the time of a token that already holds the mutex; returns its fence.
local function give_again(token, ttl)
  if ttl == '0' then
    give(token, ttl)
  else
    redis.call('PEXPIRE', KEYS[1], ttl)
  end
  local fence = tonumber(redis.pcall('GET', KEYS[3]))
  return fence and fence > 1 and fence or next_fence()
end

