-- RELEASE: frees the lease if it is still the token's, wakes the queue.
--
-- KEYS: lease, queue
-- ARGV: token
-- Returns 1 freed | 0 the lease is another's
--
-- Atomic, because a DEL after a separate check could free the lease of somebody else.
-- calls: get del lrange publish
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
wake(KEYS[2], 'w' .. ARGV[1] .. name_of(KEYS[1]), ARGV[1])
return 1
