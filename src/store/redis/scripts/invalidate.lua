-- INVALIDATE: removes entry, lease and outcome, tells the holder and the queue. INSERT: the same,
-- and an entry takes the old one's place.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: '1' to insert; the entry; its lifetime in ms; if it is to be only over another one, that one
-- Returns 1, or an error if foreign data stands where the entry should go
--
-- Atomic, because a load that commits between removing the entry and removing its lease would
-- bring back what was invalidated.
-- calls: strlen set del get lrange publish
local length = redis.pcall('STRLEN', KEYS[1])
local foreign = type(length) == 'table'
if foreign and (ARGV[1] == '1' or not string.find(length.err, 'WRONGTYPE', 1, true)) then
  return length
end
local insert = ARGV[1] == '1'
if insert and ARGV[4] then
  -- Something else was stored meanwhile, or it was invalidated. (Its own: asked again, the first answer was lost.)
  local there = redis.call('GET', KEYS[1])
  insert = there == ARGV[4] or there == ARGV[2]
end
if insert then
  -- First of the writes: refused (out of memory, no replicas), it leaves everything as it was.
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
elseif not foreign then
  redis.call('DEL', KEYS[1])
end
local holder = redis.pcall('GET', KEYS[2])
redis.call('DEL', KEYS[2], KEYS[4])
wake(KEYS[3], 'x' .. name_of(KEYS[1]), nil, type(holder) == 'string' and holder)
return 1
