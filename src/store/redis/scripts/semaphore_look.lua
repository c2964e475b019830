-- LOOK at a semaphore. Changes nothing.
--
-- KEYS: holders, queue, meta
-- Returns nil | {capacity at creation, capacity, waiters, 0, 0, and for each holder its token and
--         the remaining ms of its lease}
--
-- Atomic, because a permit that changes hands between two reads would be counted twice or not at
-- all.
-- calls: get time llen zrange
local meta = redis.call('GET', KEYS[3])
if not meta then
  return false
end
local created, added = string.match(meta, '^1 (%d+) (%-?%d+) %d+$')
if not created then
  return redis.error_reply('ERR not a semaphore of a layout that is known here')
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = {tonumber(created), math.min(created + added, 4294967295), redis.call('LLEN', KEYS[2]), 0, 0}
local holders = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #holders, 2 do
  if tonumber(holders[i + 1]) > now then
    state[#state + 1] = holders[i]
    state[#state + 1] = holders[i + 1] - now
  end
end
return state
