-- INVALIDATE: removes entry, lease and outcome, and notifies the holder and the queue. INSERT: the same, and a new entry
-- replaces the old one.
--
-- KEYS: entry, lease, queue, outcome, the node's attempts; to announce the change also registry, log
-- ARGV: three as in attempt.lua; a token of a node that does not exist, for the fence; '1' to insert, and then the entry; its lifetime in
--         ms; the only entry that it may replace, or ''; to announce the change last as in announcing.lua
-- Returns 1 | 11 the same, and the caller must continue with WAKE REST | {1 or 11, the text of announcing.lua} | what attempt.lua
--         answers instead of the change | to insert, an error if the entry's key holds foreign data
--
-- Atomic, because a load that commits between the removal of the entry and that of its lease would restore what was
-- invalidated.
-- calls: strlen set del get lpop lrange rpush publish pttl hgetall hset pexpire
-- A call that was delayed on its way would overwrite, or remove, newer entries: a change holds no lease that could be checked.
local too_late = late(KEYS[5])
if too_late then
  return too_late
end
local length = redis.pcall('STRLEN', KEYS[1])
local foreign = type(length) == 'table'
local insert = ARGV[5] == '1'
if foreign and (insert or not string.find(length.err, 'WRONGTYPE', 1, true)) then
  return length
end
if insert and ARGV[8] ~= '' then
  -- Nothing is inserted if another entry was stored meanwhile, or the entry was invalidated. If the call is repeated because
  -- its first answer was lost, the new entry is there already.
  local there = redis.call('GET', KEYS[1])
  insert = there == ARGV[8] or there == ARGV[6]
end
if insert then
  -- This is the first write: if it is refused (out of memory, no replicas), nothing has changed.
  redis.call('SET', KEYS[1], ARGV[6], 'PX', ARGV[7])
elseif not foreign then
  redis.call('DEL', KEYS[1])
end
local holder = redis.pcall('GET', KEYS[2])
local leased = type(holder) == 'string'
if leased then
  redis.call('DEL', KEYS[2])
end
if may_be_ours(KEYS[4]) then
  redis.call('DEL', KEYS[4])
end
void_earlier(KEYS[5])
-- The nodes are notified after the removal, because each drops its copy then, and reads the entry again.
return announced(wake(1, KEYS[3], 'x' .. name_of(KEYS[1]), ARGV[4], nil, leased and holder), 'e')
