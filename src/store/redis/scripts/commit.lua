-- COMMIT: if the lease is still the token's, stores the entry, frees the lease, wakes the queue.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: token; entry; lifetime of the entry in ms
-- Returns 1 stored | 0 not stored: the token does not hold the lease | 2 not stored: the entry's key
--         holds foreign data | 11 or 12: as 1 or 2, and the caller must continue with WAKE REST
--
-- Atomic, because a lease that expires between the check and the SET would let an older value
-- replace a newer one.
-- calls: get strlen set del lpop lrange rpush publish
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
local done = 1
local length = redis.pcall('STRLEN', KEYS[1])
if type(length) == 'table' then
  if not string.find(length.err, 'WRONGTYPE', 1, true) then
    return length
  end
  -- Foreign data is never overwritten. The waiters get the value as an outcome (in the form that
  -- ACQUIRE reads), which other callers do not.
  done = 2
else
  -- This is the first write: if it is refused (out of memory, no replicas), nothing has changed.
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
redis.call('DEL', KEYS[2])
if may_be_ours(KEYS[4]) then
  if done == 1 then
    redis.call('DEL', KEYS[4])
  else
    redis.call('SET', KEYS[4], ARGV[1] .. '99999999990000010000v' .. ARGV[2], 'PX', 10000)
  end
end
return wake(done, KEYS[3], 'w' .. ARGV[1] .. name_of(KEYS[1]), ARGV[1], ARGV[1])
