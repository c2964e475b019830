-- RENEW: gives the lease its full time again, if it is still the token's.
--
-- KEYS: lease
-- ARGV: token; lease in ms
-- Returns 1 renewed | 0 the token does not hold the lease
--
-- Atomic, because a PEXPIRE after a separate check could prolong another token's lease.
-- calls: get pexpire
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
