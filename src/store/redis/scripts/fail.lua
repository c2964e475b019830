-- FAIL: if the lease is still the token's, leaves the outcome for the waiters, removes, replaces or leaves the older entry,
-- frees the lease, wakes the queue.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: token; outcome in the form that ACQUIRE reads; its lifetime in ms; marker entry; the
--         marker's lifetime in ms, or '0' to leave the entry, or '-' to remove the entry seen; the head
--         of the entry seen, in the form that ACQUIRE takes
-- Returns 1 done | 11 done, and the caller must continue with WAKE REST | 0 the token does not hold the
--         lease
--
-- Atomic, because a waiter that finds the lease free before the outcome is stored loads again: the
-- convoy of retries that the outcome prevents. Also because a separate step might remove a newer
-- entry than the one that was seen.
-- calls: get del strlen set getrange lpop lrange rpush publish
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
-- DEL comes first: after a write that is always allowed, a server short of memory lets the rest of the
-- script run, and the outcome matters most under load.
redis.call('DEL', KEYS[2])
if may_be_ours(KEYS[4]) then
  redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
end
if ARGV[5] ~= '0' then
  -- Only the head is read, because copying a large entry into the script blocks the server.
  local head = redis.pcall('GETRANGE', KEYS[1], 0, 67)
  local seen = type(head) == 'string' and '=' .. head == ARGV[6]
  if ARGV[5] == '-' then
    if seen then
      redis.call('DEL', KEYS[1])
    end
  elseif head == '' or seen then
    redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
  end
end
return wake(1, KEYS[3], 'w' .. ARGV[1] .. name_of(KEYS[1]), ARGV[1], ARGV[1])
