-- BREAK: takes the mutex from whoever holds it, tells that holder, hands it to the head of the queue.
--
-- KEYS: mutex, queue, fence
-- Returns 1 somebody held it | 0 nobody did | {1, the nodes that do not hear} FREE is to go on with the queue
--
-- Atomic, because the holder that is told must be the one it was taken from.
-- calls: get del set incr time lpop publish pttl lrange
local holder = redis.call('GET', KEYS[1])
if not holder then
  return 0
end
-- What a foreign client has written is no token, and it hears nothing of ours.
if #holder == 65 then
  redis.pcall('PUBLISH', 'sg1:i:' .. string.sub(holder, 1, 32), 'b' .. holder)
end
if not pass_on() then
  redis.call('DEL', KEYS[1])
end
return go_on and {1, table.concat(found)} or 1
