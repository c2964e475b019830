-- RELEASE: frees the lease if it is still the token's, wakes the queue; else gives up its place there.
--
-- KEYS: lease, queue
-- ARGV: token
-- Returns 1 freed | 11 freed, and WAKE REST is to go on | 0 the lease is another's
--
-- Atomic, because a DEL after a separate check could free the lease of somebody else; and because between a look that
-- finds the lease another's and the end of the place in the queue it could be handed to it.
-- calls: get del lpop lrange rpush publish lrem
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  -- Where that is refused, or the queue is not ours, it is left alone.
  -- Once: it has one place, which is among the first where it waited for long.
  redis.pcall('LREM', KEYS[2], 1, ARGV[1])
  return 0
end
redis.call('DEL', KEYS[1])
return wake(1, KEYS[2], 'w' .. ARGV[1] .. name_of(KEYS[1]), ARGV[1], ARGV[1])
