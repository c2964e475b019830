-- ANNOUNCE: adds a change to the log, notifies all members but the announcer, and answers which members these are.
--
-- KEYS: registry, log
-- ARGV: `e` or `t` and the name of a key or a tag; then as in announcing.lua
-- Returns nil there is no registry | the text of announcing.lua
--
-- Atomic, because a node that registers between two steps would be neither notified nor among the members.
-- calls: pttl hgetall hset del lrange rpush lpop pexpire publish
return announce(ARGV[1])
