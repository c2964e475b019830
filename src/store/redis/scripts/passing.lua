-- Prelude of the scripts that give something to the waiters of a queue. It takes places out of the queue, a bounded
-- number in one call, because no call may hold the server for long, however many have died while they waited.
-- Where there are more, the script answers so, and its caller calls again.
--
-- KEYS: the lock's own, its queue
-- calls: lpop lrange publish

-- A call tries this many waiters at the most, a PUBLISH each, and takes this many places.
local tries, places = 100, 2000
-- The nodes that do not hear, so that the other places of theirs cost no PUBLISH; and those that this call has found.
local dead, found = {}, {}
-- Whether this call has come to its bounds.
local go_on = false
-- The places that were read, and how many of them are used up; nil before the first.
local ahead, used = nil, 0

-- The nodes that earlier calls have found, 32 digits each.
local function know(nodes)
  for at = 1, #(nodes or ''), 32 do
    dead[string.sub(nodes, at, at + 31)] = true
  end
end

-- Takes the places that are used up out of the queue.
local function settle()
  if used > 0 then
    redis.call('LPOP', KEYS[2], used)
    ahead, used = {}, 0
  end
end

-- The next place, which is taken; nil if there is none, or this call has come to its bounds. The first one is
-- taken by itself: most are heard.
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

-- In a cluster, for how long a waiter is given what it wants for so many ms, until it asks for it.
local function claim_of(ms)
  return math.min(longest_claim, math.max(250, math.floor(ms / 4)))
end

-- Tells the waiter; whether its node hears. In a cluster that can not be known, and counts as yes.
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
