-- Prelude of the scripts that may make the time to wait for a lock shorter.
--
-- KEYS: the lock's own, its queue
-- calls: lrange publish

-- In a cluster: the nodes that were given something just now.
local given = spread and {}

-- Tells those who wait that its time ends sooner than they were told when they looked; once per node. In a cluster,
-- where that is so at each hand-over, two are enough to look after a claim: the first of them that is another node's,
-- and the last, which came when those at the head may have been dead for long. All are told of what is more than that.
-- Foreign data where the queue should be is nobody who waits.
local function tell_sooner(all)
  local waiters, told = redis.pcall('LRANGE', KEYS[2], 0, -1), {}
  local function tell(from, to, step)
    for i = from, to, step do
      local node = string.sub(waiters[i], 1, 32)
      if not told[node] and not (spread and given[node]) then
        told[node] = true
        redis.pcall('PUBLISH', 'sg1:i:' .. node, 'r' .. KEYS[1])
        if spread and not all then
          return
        end
      end
    end
  end
  tell(1, #waiters, 1)
  if spread and not all then
    tell(#waiters, 1, -1)
  end
end

