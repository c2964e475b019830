-- INVALIDATE: removes entry, lease and outcome, tells the holder and the queue. INSERT: the same, and a new entry takes
-- the old one's place.
--
-- KEYS: entry, lease, queue, outcome; to announce the change also registry, log
-- ARGV: a token of no node's, for the fence; '1' to insert, and then the entry; its lifetime in ms; the latest moment to run,
--         in ms of this server's clock, or ''; the only entry that it may replace, or ''; to announce the change last as in
--         announcing.lua
-- Returns 1 | 11 the same, and the caller must continue with WAKE REST | {one of these, the text of announcing.lua} | {now in
--         ms} it ran after its latest moment | an error if the entry's key holds foreign data
--
-- Atomic, because a load that commits between the removal of the entry and that of its lease would restore what was
-- invalidated.
-- calls: time strlen set del get lpop lrange rpush publish pttl hgetall hset pexpire
if ARGV[2] == '1' and ARGV[5] ~= '' then
  -- A call that was delayed on its way would overwrite newer entries: an insertion holds no lease that could be checked.
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if now > tonumber(ARGV[5]) then
    return {now}
  end
end
local length = redis.pcall('STRLEN', KEYS[1])
local foreign = type(length) == 'table'
if foreign and (ARGV[2] == '1' or not string.find(length.err, 'WRONGTYPE', 1, true)) then
  return length
end
local insert = ARGV[2] == '1'
if insert and ARGV[6] ~= '' then
  -- Another entry was stored meanwhile, or the entry was invalidated. The new entry is there already if the first answer
  -- was lost and the call is repeated.
  local there = redis.call('GET', KEYS[1])
  insert = there == ARGV[6] or there == ARGV[3]
end
if insert then
  -- The first write: if it is refused (out of memory, no replicas), nothing has changed.
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
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
-- After the removal: a node that is told drops its copy and reads the entry again.
return announced(wake(1, KEYS[3], 'x' .. name_of(KEYS[1]), ARGV[1], nil, leased and holder), 'e')
