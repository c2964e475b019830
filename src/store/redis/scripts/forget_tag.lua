-- FORGET TAG: removes the id of a tag, and announces that.
--
-- KEYS: tag, the node's attempts; to announce the change also the journal of tags, registry, log
-- ARGV: three as in attempt.lua; to announce the change then as in announcing.lua
-- Returns 1 | {1, the text of announcing.lua} | what attempt.lua answers instead of the change
--
-- Atomic, so that the removal and its announcement take one round trip.
-- calls: del zrange zadd zremrangebyscore pttl hgetall hset lrange rpush lpop pexpire publish
local too_late = late(KEYS[2])
if too_late then
  return too_late
end
redis.call('DEL', KEYS[1])
void_earlier(KEYS[2])
if KEYS[3] then
  note_invalidated(KEYS[3], string.sub(KEYS[1], 8, -2))
end
return announced(1, 't')
