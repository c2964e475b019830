-- Prelude of the scripts about semaphores.
--
-- KEYS: holders, queue, meta
-- calls: get time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange

local now, capacity, created_with, idle, holding, recovered
-- Whether there were waiters when this step began, and when the first lease was due to end then: they sleep until that.
local waiting, waited_for

-- When the first (0) or the last (-1) lease ends, and its holder's token.
local function lease_end(at)
  local holder = redis.call('ZRANGE', KEYS[1], at, at, 'WITHSCORES')
  return tonumber(holder[2]), holder[1]
end

-- Cuts the leases of the first permits down to what their holders have requested; they are longer if the server's clock was
-- set back. One call cuts at most 500; a later call cuts the next ones.
local function cut_down()
  local holders = redis.call('ZRANGE', KEYS[1], 0, 499, 'WITHSCORES')
  for at = 1, #holders, 2 do
    local longest = length(holders[at])
    if longest and holders[at + 1] - now > longest then
      redis.call('ZADD', KEYS[1], now + longest, holders[at])
    end
  end
end

-- Reads all keys, so that foreign data at any of them ends the script before its first write. Returns an error for data
-- that is not a semaphore of this layout. Removes the permits whose leases have ended.
local function open()
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  local meta = redis.call('GET', KEYS[3])
  if meta then
    local created, added, idle_ttl = string.match(meta, '^1 (%d+) (%-?%d+) (%d+)$')
    if not created then
      return redis.error_reply('ERR not a semaphore of a layout that is known here')
    end
    created_with, idle = tonumber(created), tonumber(idle_ttl)
    capacity = math.min(created_with + tonumber(added), 4294967295)
  end
  waiting = redis.call('LLEN', KEYS[2]) > 0
  local first
  waited_for, first = lease_end(0)
  holding, recovered = 0, 0
  if waited_for then
    if waited_for - now > (length(first) or math.huge) then
      cut_down()
    elseif waited_for <= now then
      recovered = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
    end
    holding = redis.call('ZCARD', KEYS[1])
  end
end

local function available()
  return math.max(capacity - holding, 0)
end

-- A token that already has a permit gets no second one.
local function grant(token, lease)
  holding = holding + redis.call('ZADD', KEYS[1], now + lease, token)
end

-- Restarts the lease of the token's permit; returns whether the token has a permit. ZREM comes first: after a write that is
-- always allowed, a server short of memory lets the rest of the script run.
local function renew(token, lease)
  if redis.call('ZREM', KEYS[1], token) == 0 then
    return false
  end
  holding = holding - 1
  grant(token, lease)
  return true
end

-- Gives the available permits to the waiters that can be reached, in the order of the queue. `own` is the calling token:
-- it gets no message. Returns whether `own` got a permit. A place is a token and its lease. Passes over a token that already
-- has a permit and has a place from a take that arrived late. If the call reaches its bounds, the remaining permits stay
-- available: the next step on this semaphore continues.
local function serve(own)
  local reached = false
  local place = waiting and capacity > holding and next_place()
  while place do
    local node, token, lease = string.sub(place, 1, 32)
    if own or not dead[node] then
      token, lease = string.sub(place, 1, 65), tonumber(string.sub(place, 66))
    end
    if lease and token == own then
      grant(token, lease)
      reached = true
    elseif lease and not dead[node] then
      if spread then
        lease = claim_of(lease)
      end
      -- The permit is written first: if the message is lost, the waiter's next TAKE still finds that it is a holder.
      if redis.call('ZADD', KEYS[1], 'NX', now + lease, token) == 1 then
        holding = holding + 1
        if tell(node, 'p' .. token .. string.sub(KEYS[1], 9, -2)) then
          given[node] = true
        else
          redis.call('ZREM', KEYS[1], token)
          holding = holding - 1
        end
      end
    end
    place = capacity > holding and next_place()
  end
  settle()
  return reached
end

-- Ends a step: keeps the semaphore and its queue for the idle time, or for twice the time until the last lease ends, if that
-- is longer. Notifies the waiters if a lease ends before they wake. Returns when the first lease ends; nil without holders.
local function finish(queued)
  local first = holding > 0 and lease_end(0)
  local keep = idle
  if first then
    local last = holding > 1 and lease_end(-1) or first
    keep = math.max(idle, 2 * (last - now) + 1000)
    redis.call('PEXPIRE', KEYS[1], keep)
  end
  redis.call('PEXPIRE', KEYS[3], keep)
  if waiting or queued then
    redis.call('PEXPIRE', KEYS[2], keep)
  end
  if waiting and first and not (waited_for and first >= waited_for) then
    tell_sooner()
  end
  return first
end
