-- EXTEND: starts the time to live anew, if the mutex is still the token's.
--
-- KEYS: mutex
-- ARGV: token; time to live in ms, or '0' for none
-- Returns 1 done | 0 it is another's
--
-- Atomic, because a PEXPIRE after a separate check could prolong the mutex of somebody else.
-- calls: get set pexpire
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[2] == '0' then
  redis.call('SET', KEYS[1], ARGV[1])
  return 1
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
