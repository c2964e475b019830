-- Prelude of the scripts that give a lock to the waiters of its queue. A place is a queue's entry: a token and its time
-- to live or lease. One call removes a bounded number of places, because no call may block the server for long, however
-- many waiters have died in the queue. If more places are left, the script's answer says so, and its caller calls again.
--
-- KEYS: the lock's key, its queue
-- calls: lpop lrange publish

-- One call tries at most this many waiters, with a PUBLISH each, and removes at most this many places.
local tries, places = 100, 2000
-- The nodes that receive no messages: their other places cost no PUBLISH. `found` has those that this call has discovered.
local dead, found = {}, {}
-- Whether this call has reached its bounds, so that another must continue.
local go_on = false
-- The places that were read but not removed from the queue yet, and how many of these are used up; `ahead` is nil before the
-- first place is taken.
local ahead, used = nil, 0

-- Adds the nodes that earlier calls have discovered, 32 digits each.
local function know(nodes)
  for at = 1, #(nodes or ''), 32 do
    dead[string.sub(nodes, at, at + 31)] = true
  end
end

-- Removes the used places from the queue.
local function settle()
  if used > 0 then
    redis.call('LPOP', KEYS[2], used)
    ahead, used = {}, 0
  end
end

-- Takes and returns the next place; nil if there is none, or if this call has reached its bounds. Only the first
-- place is popped alone, because most waiters are reachable.
local function next_place()
  if tries == 0 or places == 0 then
    go_on = true
    return nil
  end
  places = places - 1
  if not ahead then
    ahead = {}
    local place = redis.pcall('LPOP', KEYS[2])
    return type(place) == 'string' and place or nil
  end
  if used == #ahead then
    settle()
    ahead = redis.pcall('LRANGE', KEYS[2], 0, 499)
  end
  if not ahead[used + 1] then
    return nil
  end
  used = used + 1
  return ahead[used]
end

-- In a cluster: how many ms the claim of a waiter lasts that wants the lock for `ms`. The waiter's TAKE replaces the claim.
local function claim_of(ms)
  return math.min(longest_claim, math.max(250, math.floor(ms / 4)))
end

-- Sends a message to a waiter's node; returns whether the node receives messages. In a cluster that is not known, so each counts
-- as a receiver.
local function tell(node, message)
  tries = tries - 1
  local receivers = redis.pcall('PUBLISH', 'sg1:i:' .. node, message)
  if spread or type(receivers) == 'number' and receivers > 0 then
    return true
  end
  dead[node] = true
  found[#found + 1] = node
  return false
end
