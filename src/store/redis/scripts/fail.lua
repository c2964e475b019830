-- FAIL: leaves the outcome for those who wait, frees the lease, wakes the queue.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: token; outcome as ACQUIRE reads it; its lifetime in ms; marker entry; the marker's lifetime
--       in ms, or '0' for no marker; what was seen as ACQUIRE takes it
-- Returns 1 done | 0 the lease is another's
--
-- Atomic, because a waiter that finds the lease free before the outcome is there loads again: the
-- convoy of retries that the outcome prevents.
-- calls: get del strlen set lrange publish
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
-- DEL comes first: after a write that is always allowed, a server short of memory lets the rest of
-- a script through, and it is under load that the outcome matters.
redis.call('DEL', KEYS[2])
if may_be_ours(KEYS[4]) then
  redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
end
if ARGV[5] ~= '0' then
  local entry = redis.pcall('GET', KEYS[1])
  local seen = type(entry) == 'string' and '=' .. string.sub(entry, 1, 68) == ARGV[6]
  if not entry or seen then
    redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
  end
end
wake(KEYS[3], 'w' .. ARGV[1] .. name_of(KEYS[1]), ARGV[1])
return 1
