-- HAND OVER: gives the lease to the first waiter that can be reached; frees it if there is none.
--
-- KEYS: lease, queue
-- ARGV: token; lease in ms, or '' for its remaining time; how many loads of this wave have vanished; 1 if the token's node
--         is shutting down: its waiters leave, too, and are passed over
-- Returns 2 a waiter holds the lease | 1 the lease is free | 0 another token holds it
--         | 3 some places were passed, the token still holds it, and the caller must call HAND OVER again
--
-- Atomic, because any newcomer could take a lease that is free for a moment, and a lease given to a dead waiter would be
-- lost: the script counts the receivers of the grant before any other client can look.
-- One call passes a bounded number of places and processes, because the server does nothing else meanwhile. If the client
-- dies before it calls again, the lease expires.
-- calls: get pttl lrange lpop set publish del
local PIECE, PLACES, PROCESSES = 100, 2000, 250
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local whole = ARGV[2]
if whole == '' then
  whole = math.max(redis.call('PTTL', KEYS[1]), 1)
end
-- If the new holder gets a claim only, its first renewal makes that a full lease.
local lease = spread and math.max(250, math.floor(tonumber(whole) / 4)) or whole
local name = string.sub(KEYS[1], 8, -2)
local tail = string.format('%02d', math.min(tonumber(ARGV[3]), 99)) .. name
-- Nodes without a reachable waiter. The first is the node in the tokens of fences.
local gone, tried = {[string.rep('0', 32)] = true}, 0
if ARGV[4] == '1' then
  gone[string.sub(ARGV[1], 1, 32)] = true
end

-- Gives the lease to this waiter; returns whether the waiter has it.
local function give(token)
  local node = string.sub(token, 1, 32)
  if token == ARGV[1] or gone[node] then
    return false
  end
  tried = tried + 1
  -- The lease first: if the message is lost, the waiter still finds itself the holder at its next ACQUIRE.
  redis.call('SET', KEYS[1], token, 'PX', lease)
  local receivers = redis.pcall('PUBLISH', 'sg1:i:' .. node, 'g' .. token .. tail)
  gone[node] = not spread and not (type(receivers) == 'number' and receivers > 0)
  return not gone[node]
end

-- Tells the next process in the queue that the holder behind which it sleeps has ended. That process asks again and learns
-- when this waiter's claim ends.
local function tell_next(waiter)
  for _, other in ipairs(redis.call('LRANGE', KEYS[2], 0, PIECE - 1)) do
    local node = string.sub(other, 1, 32)
    if node ~= string.sub(waiter, 1, 32) and not gone[node] then
      redis.pcall('PUBLISH', 'sg1:i:' .. node, 'w' .. ARGV[1] .. name)
      return
    end
  end
end

local passed = 0
while passed < PLACES and tried < PROCESSES do
  local piece = redis.call('LRANGE', KEYS[2], 0, PIECE - 1)
  if not piece[1] then
    redis.call('DEL', KEYS[1])
    return 1
  end
  for place, token in ipairs(piece) do
    if give(token) then
      redis.call('LPOP', KEYS[2], place)
      if spread then
        tell_next(token)
      end
      return 2
    end
  end
  redis.call('LPOP', KEYS[2], #piece)
  passed = passed + #piece
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', whole)
return 3
