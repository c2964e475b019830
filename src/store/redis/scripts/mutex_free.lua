-- FREE: hands the mutex to the head of the queue if it is the token's; else gives up a place in it, and
-- hands it on all the same if it is nobody's: who leaves may be the one that should have seen to it.
--
-- KEYS: mutex, queue, fence
-- ARGV: token; the same with its time to live, as it stands in the queue
-- Returns 1 it held the mutex | 0 it did not
--
-- Atomic, because a DEL after a separate check could free the mutex of somebody else, and a mutex
-- given to a waiter that died is nobody's: the receivers of the grant are counted before anyone
-- else looks.
-- calls: get del lrem set incr time lpop publish pttl lrange
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  if not pass_on(nil, ARGV[1]) then
    redis.call('DEL', KEYS[1])
  end
  return 1
end
redis.pcall('LREM', KEYS[2], 0, ARGV[2])
if not holder and not pass_on() then
  redis.call('DEL', KEYS[1])
end
return 0
