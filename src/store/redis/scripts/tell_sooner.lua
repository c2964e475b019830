-- Prelude of the scripts that may make the time to wait for a lock shorter.
--
-- KEYS: the lock's own, its queue
-- calls: lrange publish

-- The nodes that were given something just now.
local given = {}

-- Tells those who wait that its time ends sooner than they were told when they looked; once per node. Of many it tells
-- those of the first places and of the last ones, which came when the others may have been dead for long: one that looks
-- is enough for all. In a cluster, where that is so at each hand-over, two are enough to look after a claim: the first of
-- them that is another node's, and the last; `all` is for what is more than that.
-- Foreign data where the queue should be is nobody who waits.
local function tell_sooner(all)
  local told = {}
  local function tell(waiters, from, to, step)
    local left = spread and not all and 1 or 50
    for i = from, to, step do
      local node = string.sub(waiters[i], 1, 32)
      -- What is shorter is no place.
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

