-- NOTE TAG: notes in the journal of tags that a tag is invalidated. In a cluster, where FORGET TAG cannot do that, it goes before it.
--
-- KEYS: journal
-- ARGV: the tag
-- Returns 1
--
-- Atomic, because two events must not have one number.
-- calls: zrange zadd zremrangebyscore del pttl pexpire
note_invalidated(KEYS[1], ARGV[1])
return 1
