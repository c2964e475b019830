-- FORGET TAG: removes the id of a tag, and announces that.
--
-- KEYS: tag, registry, log
-- ARGV: as in announcing.lua
-- Returns 1 | {1, the text of announcing.lua}
--
-- Atomic, so that the removal and its announcement take one round trip.
-- calls: del pttl hgetall hset lrange rpush lpop pexpire publish
redis.call('DEL', KEYS[1])
return announced(1, 't')
