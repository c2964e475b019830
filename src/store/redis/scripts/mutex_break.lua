-- BREAK: takes the mutex from its holder, notifies that holder, and hands the mutex to the head of
-- the queue.
--
-- KEYS: mutex, queue, fence
-- Returns 1 it had a holder | 0 it had none | {1, the nodes that receive no messages} the caller must
--         continue with FREE
--
-- Atomic, because the holder that is notified must be the one that loses the mutex.
-- calls: get del set incr time lpop publish pttl lrange
local holder = redis.call('GET', KEYS[1])
if not holder then
  return 0
end
-- A value that a foreign client has written is no token, and that client does not receive messages of
-- this crate.
if #holder == 65 then
  redis.pcall('PUBLISH', 'sg1:i:' .. string.sub(holder, 1, 32), 'b' .. holder)
end
if not pass_on() then
  redis.call('DEL', KEYS[1])
end
return go_on and {1, table.concat(found)} or 1
