-- Prelude of the scripts about semaphores.
--
-- KEYS: holders, queue, meta
-- calls: get time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange

local now, capacity, created_with, idle, available, recovered
-- Whether anybody waits, and until when they have been told to.
local waiting, until_then

-- Looks at all keys, so that foreign data at one of them ends the script before its first write.
-- Answers an error for what is there and is no semaphore of this layout.
local function open()
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  local meta = redis.call('GET', KEYS[3])
  if meta then
    local created, added, idle_ttl = string.match(meta, '^1 (%d+) (%d+) (%d+)$')
    if not created then
      return redis.error_reply('ERR not a semaphore of a layout that is known here')
    end
    created_with, idle = tonumber(created), tonumber(idle_ttl)
    capacity = math.min(created_with + tonumber(added), 4294967295)
  end
  waiting = redis.call('LLEN', KEYS[2]) > 0
  until_then = waiting and redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  -- Forgets the permits whose leases have ended.
  recovered = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  if meta then
    available = math.max(capacity - redis.call('ZCARD', KEYS[1]), 0)
  end
end

-- Gives what is available to those in the queue that can be reached, in its order. `own` is not
-- told: it is asking. Whether it was among them. A waiter is its token and its lease.
local function serve(own)
  local reached = false
  while available > 0 do
    local waiter = redis.call('LPOP', KEYS[2])
    if not waiter then
      break
    end
    local token, lease = string.sub(waiter, 1, 65), tonumber(string.sub(waiter, 66))
    if lease then
      -- The permit first: if the grant is lost, the waiter still finds itself a holder at its next
      -- TAKE.
      redis.call('ZADD', KEYS[1], now + lease, token)
      local heard = token == own
      reached = reached or heard
      if not heard then
        local grant = 'p' .. token .. string.sub(KEYS[1], 9, -2)
        local receivers = redis.pcall('PUBLISH', 'sg1:i:' .. string.sub(token, 1, 32), grant)
        heard = type(receivers) == 'number' and receivers > 0
      end
      if heard then
        available = available - 1
      else
        redis.call('ZREM', KEYS[1], token)
      end
    end
  end
  return reached
end

-- Tells those who wait if a lease ends sooner than they were told when they looked; once per node.
local function tell_sooner()
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  if not first or (until_then and tonumber(first) >= tonumber(until_then)) then
    return
  end
  local told = {}
  for _, waiter in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    local node = string.sub(waiter, 1, 32)
    if not told[node] then
      told[node] = true
      redis.pcall('PUBLISH', 'sg1:i:' .. node, 'r' .. KEYS[1])
    end
  end
end

-- Ends a step: keeps the semaphore for its idle time, and for as long as anybody needs it.
local function finish()
  if waiting then
    tell_sooner()
  end
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  local keep = last and math.max(idle, 2 * (last - now) + 1000) or idle
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, keep)
  end
end
