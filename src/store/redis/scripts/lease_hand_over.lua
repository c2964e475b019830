-- HAND OVER: gives the lease to the first waiter that can be reached; frees it if there is none.
--
-- KEYS: lease, queue
-- ARGV: token; lease in ms, or '' for its remaining time; how many loads have vanished one after another; 1 if the token's
--         node is shutting down: waiters of the same node leave, too, and are passed over
-- Returns 2 a waiter holds the lease | 1 the lease is free | 0 the token does not hold it
--         | 3 some places were passed, the token still holds the lease, and the caller must call HAND OVER again
--
-- Atomic, because any newcomer could take a lease that is free for a moment, and a lease given to a dead waiter would be
-- lost: the script counts the receivers of the grant before any other client can look.
-- A place is a token in the queue. One call passes a bounded number of places and processes, because the server does nothing
-- else meanwhile. If the client dies before it calls again, the lease expires.
-- calls: get pttl lrange lpop set publish del
local PIECE, PLACES, PROCESSES = 100, 2000, 250
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local whole = ARGV[2]
if whole == '' then
  whole = math.max(redis.call('PTTL', KEYS[1]), 1)
end
-- In a cluster the new holder gets only a short claim (see spread.lua), which its first renewal makes a full lease.
local lease = spread and math.max(250, math.floor(tonumber(whole) / 4)) or whole
local name = string.sub(KEYS[1], 8, -2)
local tail = string.format('%02d', math.min(tonumber(ARGV[3]), 99)) .. name
-- The nodes that are not tried again, because they cannot be reached or leave. The first is the node in the tokens of fences.
local gone, tried = {[string.rep('0', 32)] = true}, 0
if ARGV[4] == '1' then
  gone[string.sub(ARGV[1], 1, 32)] = true
end

-- Gives the lease to the waiter with this token. Returns false if that waiter is passed over, or is known not to receive the message:
-- the lease is then still to be given.
local function give(token)
  local node = string.sub(token, 1, 32)
  if token == ARGV[1] or gone[node] then
    return false
  end
  tried = tried + 1
  -- The lease is written first: if the message is lost, the waiter's next ACQUIRE still finds that it is the holder.
  redis.call('SET', KEYS[1], token, 'PX', lease)
  local receivers = redis.pcall('PUBLISH', 'sg1:i:' .. node, 'g' .. token .. tail)
  gone[node] = not spread and not (type(receivers) == 'number' and receivers > 0)
  return not gone[node]
end

-- Notifies the next process in the queue that the lease of the previous holder has ended. That process sends an ACQUIRE, and so
-- learns when the claim of this waiter ends.
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
