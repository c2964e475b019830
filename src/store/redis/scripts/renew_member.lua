-- RENEW of a membership: the node is a member, with this stamp, from now on.
--
-- KEYS: registry, log
-- ARGV: node; stamp; the node's term in ms; a random id; the id of a registry that the node has known for a term, or '';
--         number (16 digits) and id of the entry up to which the node has applied the log, or ''
-- Returns {text, 1, the entries after that one} | {text, 0} the log does not have that entry; the text is: the registry's id,
--         '1' if it is mature, longest term in ms, number and id of the newest entry
--
-- Atomic, because an announcement between the registration and the reading of the log would reach the node neither as a
-- message nor in the answer.
-- calls: hmget hset del lrange rpush pexpire
local birth, mature, longest, number = unpack(redis.call('HMGET', REGISTRY, 'b', 'm', 't', 'c'))
local known = {b = birth, m = mature, t = longest, c = number}
local set, changed, is_new = opened(known, ARGV[4], ARGV[3], ARGV[5])
if tonumber(ARGV[3]) > tonumber(known.t) then
  set('t', ARGV[3])
end
set(ARGV[1], ARGV[2])
-- As in announcing.lua: a server that is out of memory refuses a script's first write, and never PEXPIRE. If HSET is refused all the
-- same, nothing has changed, and the node gets no right.
redis.call('PEXPIRE', REGISTRY, LIFE)
redis.call('HSET', REGISTRY, unpack(changed))

local behind = ARGV[6] ~= '' and known.c - tonumber(string.sub(ARGV[6], 1, 16)) or -1
local may_be_there = behind >= 0 and behind < LOG_LENGTH
local entries = newest(may_be_there and behind + 1 or 1, known.c, ARGV[4], is_new)
keep()
local last = entries[#entries]
local is_there = may_be_there and string.sub(entries[1], 1, 48) == ARGV[6]
local text = {known.b, known.m or '0', known.t, string.sub(last, 1, 16), string.sub(last, 17, 48)}
if not is_there then
  return {table.concat(text, ' '), 0}
end
-- The 1 of the answer replaces the entry that the node has applied; the text goes before it.
entries[1] = 1
table.insert(entries, 1, table.concat(text, ' '))
return entries
