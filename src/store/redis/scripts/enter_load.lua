-- ENTER LOAD: notes in the journal of tags that a load begins.
--
-- KEYS: journal
-- ARGV: the load's id; for how many ms the journal lives at least
-- Returns 1
--
-- Atomic, because two events must not have one number.
-- calls: zrange zadd zremrangebyscore del pttl pexpire
note(KEYS[1], 'l' .. ARGV[1], ARGV[2])
return 1
