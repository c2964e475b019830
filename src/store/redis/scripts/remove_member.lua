-- FORGET and LEAVE: removes a member, if its stamp is still this one.
--
-- KEYS: registry
-- ARGV: node; stamp
-- Returns 1 removed | 0 the member has another stamp, or there is none
--
-- Atomic, because a member that was renewed meanwhile has a right that announcers must know of.
-- calls: hmget hdel
if redis.call('HMGET', KEYS[1], ARGV[1])[1] == ARGV[2] then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
