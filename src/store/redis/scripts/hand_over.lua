-- HAND OVER: gives the lease to the first waiter that can be reached; frees it if there is none.
--
-- KEYS: lease, queue
-- ARGV: token; lease in ms, or '' for what is left of it; how many loads of this wave have vanished; 1 where the token's
--   node ends: who waits there leaves, too, and is passed over
-- Returns 2 a waiter has it | 1 it is free | 0 it is another's
--
-- Atomic, because a lease that is free for a moment goes to any newcomer, and a lease given to a
-- waiter that died is nobody's: the receivers of the grant are counted before anyone else looks.
-- calls: get pttl lpop set publish del lrange
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local lease = ARGV[2]
if lease == '' then
  lease = math.max(redis.call('PTTL', KEYS[1]), 1)
end
if spread then
  -- The new leader's first renewal makes it a whole one.
  lease = math.max(250, math.floor(tonumber(lease) / 4))
end
local tail = string.format('%02d', math.min(tonumber(ARGV[3]), 99)) .. string.sub(KEYS[1], 8, -2)
local node = string.sub(ARGV[1], 1, 32)
local token = redis.call('LPOP', KEYS[2])
while token do
  if token ~= ARGV[1] and (ARGV[4] ~= '1' or string.sub(token, 1, 32) ~= node) then
    -- The lease first: if the grant is lost, the waiter still finds itself the holder at its next
    -- ACQUIRE.
    redis.call('SET', KEYS[1], token, 'PX', lease)
    local receivers = redis.pcall('PUBLISH', 'sg1:i:' .. string.sub(token, 1, 32), 'g' .. token .. tail)
    if spread then
      for _, other in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
        if string.sub(other, 1, 32) ~= string.sub(token, 1, 32) then
          -- That the holder it sleeps behind has ended; it asks again, and learns of the claim's end.
          local ended = 'w' .. ARGV[1] .. string.sub(KEYS[1], 8, -2)
          redis.pcall('PUBLISH', 'sg1:i:' .. string.sub(other, 1, 32), ended)
          break
        end
      end
      return 2
    end
    if type(receivers) == 'number' and receivers > 0 then
      return 2
    end
  end
  token = redis.call('LPOP', KEYS[2])
end
redis.call('DEL', KEYS[1])
return 1
