-- EXTEND: restarts the time to live, if the mutex is still the token's.
--
-- KEYS: mutex, queue, the latest extension that exceeds the time in the token
-- ARGV: token; time to live in ms, or '0' for none
-- Returns 1 done | 0 the token does not hold the mutex
--
-- Atomic, because a PEXPIRE after a separate check could prolong another token's mutex.
-- calls: get set pexpire pttl lrange publish
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local longest = length(ARGV[1])
if ARGV[2] == '0' then
  redis.call('SET', KEYS[1], ARGV[1])
  if longest then
    redis.call('SET', KEYS[3], ARGV[1] .. ARGV[2])
  end
  return 1
end
if longest and tonumber(ARGV[2]) > longest then
  -- The time in the token is shorter, and without this key REPAIR would cut the mutex's time down to it.
  redis.call('SET', KEYS[3], ARGV[1] .. ARGV[2], 'PX', ARGV[2])
end
local before = redis.call('PTTL', KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if before < 0 or tonumber(ARGV[2]) < before then
  tell_sooner(true)
end
return 1
