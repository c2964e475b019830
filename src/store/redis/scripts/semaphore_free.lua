-- FREE of a permit: gives it to the head of the queue if it is still the token's; else gives up a place
-- in the queue.
--
-- KEYS: holders, queue, meta
-- ARGV: token; the same with its lease, as it stands in the queue, or '' for none; the nodes that do not hear
-- Returns {1 it held a permit | 0, available}, and last the nodes that do not hear where it is to go on
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
if held == 0 and ARGV[2] ~= '' then
  -- The first is enough: there are two only where a take was sent twice, and then so is this.
  redis.call('LREM', KEYS[2], 1, ARGV[2])
end
know(ARGV[3])
serve()
finish()
return {held, available(), go_on and table.concat(found) or nil}
