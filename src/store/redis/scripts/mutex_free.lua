-- FREE: hands the mutex to the head of the queue if it is the token's; else gives up a place in it, and
-- hands it on all the same if it is nobody's: who leaves may be the one that should have seen to it.
--
-- KEYS: mutex, queue, fence
-- ARGV: token; its time to live, as it stands in the queue, or '' for no place; the nodes that do not hear
-- Returns 1 it held the mutex | 0 it did not | {that, the nodes that do not hear} go on
--
-- Atomic, because a DEL after a separate check could free the mutex of somebody else, and a mutex
-- given to a waiter that died is nobody's: the receivers of the grant are counted before anyone
-- else looks.
-- calls: del lrem set incr time lpop publish pttl lrange
if holder == ARGV[1] then
  if not pass_on(nil, ARGV[1]) then
    redis.call('DEL', KEYS[1])
  end
  return go_on and {1, table.concat(found)} or 1
end
if ARGV[2] ~= '' then
  -- The first is enough: there are two only where a take was sent twice, and then so is this.
  redis.pcall('LREM', KEYS[2], 1, ARGV[1] .. ARGV[2])
end
if not holder then
  know(ARGV[3])
  if not pass_on() then
    redis.call('DEL', KEYS[1])
  end
end
return go_on and {0, table.concat(found)} or 0
