-- EXTEND: starts the time to live anew, if the mutex is still the token's.
--
-- KEYS: mutex, queue
-- ARGV: token; time to live in ms, or '0' for none
-- Returns 1 done | 0 it is another's
--
-- Atomic, because a PEXPIRE after a separate check could prolong the mutex of somebody else.
-- calls: get set pexpire pttl lrange publish
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[2] == '0' then
  redis.call('SET', KEYS[1], ARGV[1])
  return 1
end
local before = redis.call('PTTL', KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if before < 0 or tonumber(ARGV[2]) < before then
  tell_sooner(true)
end
return 1
