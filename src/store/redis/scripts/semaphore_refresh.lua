-- REFRESH: restarts a permit's lease, if it has not ended.
--
-- KEYS: holders, queue, meta
-- ARGV: token; lease in ms
-- Returns 1 done | 0 the lease has ended | {1 or 0, the nodes that receive no messages} the caller must
--         continue with FREE
--
-- Atomic, because a permit must not be restored that another token has got meanwhile.
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
