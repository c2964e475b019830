-- FREE of a permit: gives it to the head of the queue if it is still the token's; else gives up a place
-- in the queue.
--
-- KEYS: holders, queue, meta
-- ARGV: token; the same with its lease, as it stands in the queue
-- Returns {1 it held a permit | 0, available}
--
-- Atomic, because a permit is given back once, whoever finds first that its lease has ended.
-- calls: get time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange lrem
local failure = open()
if failure then
  return failure
end
if not capacity then
  return {0, 0}
end
local held = redis.call('ZREM', KEYS[1], ARGV[1])
holding = holding - held
if held == 0 then
  redis.call('LREM', KEYS[2], 0, ARGV[2])
end
serve()
finish()
return {held, available()}
