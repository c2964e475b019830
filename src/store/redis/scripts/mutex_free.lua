-- FREE: hands the mutex to the head of the queue if it is the token's; else gives up the token's place in
-- the queue. If the mutex has no holder, it is handed on, too: the leaving waiter may be the one that
-- should have taken it.
--
-- KEYS: mutex, queue, fence
-- ARGV: token; its time to live, as in its place in the queue, or '' for no place; the nodes that receive
--         no messages
-- Returns 1 the token held the mutex | 0 it did not | {1 or 0, the nodes that receive no messages} the
--         caller must call again
--
-- Atomic, because a DEL after a separate check could free another token's mutex, and a mutex given to a
-- dead waiter would be lost: the script counts the receivers of the grant before any other client can look.
-- calls: del lrem set incr time lpop publish pttl lrange
if holder == ARGV[1] then
  if not pass_on(nil, ARGV[1]) then
    redis.call('DEL', KEYS[1])
  end
  return go_on and {1, table.concat(found)} or 1
end
if ARGV[2] ~= '' then
  -- Only the first of two equal places is removed: there are two only if a take was sent twice, and then
  -- this FREE is sent twice, too.
  redis.pcall('LREM', KEYS[2], 1, ARGV[1] .. ARGV[2])
end
if not holder then
  know(ARGV[3])
  if not pass_on() then
    redis.call('DEL', KEYS[1])
  end
end
return go_on and {0, table.concat(found)} or 0
