-- Prelude of the scripts that may shorten the time to wait for a lock.
--
-- KEYS: the lock's key, its queue
-- calls: lrange publish

-- The nodes with a waiter to which this call has given the lock.
local given = {}

-- Notifies the waiters that the lock's time ends sooner than the answers to their TAKEs said; each node once. In a long queue
-- it notifies only the nodes of the first and of the last places: one live waiter that sends a TAKE is enough for all, and the
-- last ones are the newest, so they are alive even if the first have been dead for long. In a cluster, where each hand-over
-- does this, two nodes are enough to watch a claim: those of the first and of the last place, without the nodes in `given`.
-- `all` overrides that limit.
-- Foreign data in place of the queue counts as an empty queue.
local function tell_sooner(all)
  local told = {}
  local function tell(waiters, from, to, step)
    local left = spread and not all and 1 or 50
    for i = from, to, step do
      local node = string.sub(waiters[i], 1, 32)
      -- A shorter value is not a waiter's place.
      if #waiters[i] > 65 and not told[node] and not (spread and given[node]) then
        told[node] = true
        redis.pcall('PUBLISH', 'sg1:i:' .. node, 'r' .. KEYS[1])
        left = left - 1
        if left == 0 then
          return
        end
      end
    end
  end
  local first = redis.pcall('LRANGE', KEYS[2], 0, 249)
  local last = #first < 250 and first or redis.call('LRANGE', KEYS[2], -250, -1)
  tell(first, 1, #first, 1)
  tell(last, #last, 1, -1)
end

