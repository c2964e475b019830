-- INVALIDATE: removes entry, lease and outcome, tells the holder and the queue. INSERT: the same,
-- and an entry takes the old one's place.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: a token of no node's, for the fence; '1' to insert; the entry; its lifetime in ms; its last moment in ms of this
--       server's clock, or ''; if it is to be only over another one, that one
-- Returns 1 | 11 the same, and WAKE REST is to go on | {now in ms} it came later than that | an error if foreign data stands where the entry should go
--
-- Atomic, because a load that commits between removing the entry and removing its lease would
-- bring back what was invalidated.
-- calls: time strlen set del get lpop lrange rpush publish
if ARGV[2] == '1' and ARGV[5] ~= '' then
  -- Held back on the way it would go over what others have stored since: there is no lease to ask for.
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
if insert and ARGV[6] then
  -- Something else was stored meanwhile, or it was invalidated. (Its own: asked again, the first answer was lost.)
  local there = redis.call('GET', KEYS[1])
  insert = there == ARGV[6] or there == ARGV[3]
end
if insert then
  -- First of the writes: refused (out of memory, no replicas), it leaves everything as it was.
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
return wake(1, KEYS[3], 'x' .. name_of(KEYS[1]), ARGV[1], nil, leased and holder)
