-- RELEASE: frees the lease if it is still the token's, and wakes the queue; else gives up the token's place in the
-- queue.
--
-- KEYS: lease, queue
-- ARGV: token
-- Returns 1 freed | 11 freed, and the caller must continue with WAKE REST | 0 the token does not hold the lease
--
-- Atomic, because a DEL after a separate check could free another token's lease, and the lease could be handed to
-- this token between the check and the removal of its place.
-- calls: get del lpop lrange rpush publish lrem
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  -- A queue that refuses LREM, or holds foreign data, is left alone.
  -- Count 1: the token has one place, which is near the head if it has waited for long.
  redis.pcall('LREM', KEYS[2], 1, ARGV[1])
  return 0
end
redis.call('DEL', KEYS[1])
return wake(1, KEYS[2], 'w' .. ARGV[1] .. name_of(KEYS[1]), ARGV[1], ARGV[1])
