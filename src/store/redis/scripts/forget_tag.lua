-- FORGET TAG: removes the id of a tag, or counts an expiry of the tag, and announces that.
--
-- A tag is its id, or, once it was expired, `id:expiries:time of the latest one in ms`.
--
-- KEYS: tag, the node's attempts; to announce the change also the journal of tags, registry, log
-- ARGV: three as in attempt.lua; the time of the expiry, or '' to remove the id; to announce the change then as in announcing.lua
-- Returns 1 | {1, the text of announcing.lua} | what attempt.lua answers instead of the change
--
-- Atomic, so that the removal and its announcement take one round trip.
-- calls: get set del zrange zadd zremrangebyscore pttl hgetall hset lrange rpush lpop pexpire publish
local too_late = late(KEYS[2])
if too_late then
  return too_late
end
local tag = ARGV[4] ~= '' and redis.pcall('GET', KEYS[1])
local id, expiries = string.match(type(tag) == 'string' and tag or '', '^(%d+):?(%d*)')
local expired = id and string.format('%s:%.0f:%s', id, (tonumber(expiries) or 0) + 1, ARGV[4])
-- Without memory for the expiry the values are invalidated: they must not stay fresh.
if not expired or redis.pcall('SET', KEYS[1], expired, 'KEEPTTL').err then
  redis.call('DEL', KEYS[1])
end
void_earlier(KEYS[2])
if KEYS[3] then
  note_invalidated(KEYS[3], string.sub(KEYS[1], 8, -2))
end
return announced(1, 't')
