-- REFRESH: starts a permit's lease anew, if it has not ended.
--
-- KEYS: holders, queue, meta
-- ARGV: token; lease in ms
-- Returns 1 done | 0 it has ended | {that, the nodes that do not hear} FREE is to go on with the queue
--
-- Atomic, because a permit that another has meanwhile must not come back to life.
-- calls: get time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange
local failure = open()
if failure then
  return failure
end
if not capacity then
  return 0
end
local held = renew(ARGV[1], ARGV[2])
serve()
finish()
local done = held and 1 or 0
return go_on and {done, table.concat(found)} or done
