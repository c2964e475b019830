-- Prelude of the scripts that may make the time to wait for a lock shorter.
--
-- KEYS: the lock's own, its queue
-- calls: lrange publish

-- Tells those who wait that its time ends sooner than they were told when they looked; once per node.
local function tell_sooner()
  local told = {}
  for _, waiter in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    local node = string.sub(waiter, 1, 32)
    if not told[node] then
      told[node] = true
      redis.pcall('PUBLISH', 'sg1:i:' .. node, 'r' .. KEYS[1])
    end
  end
end

