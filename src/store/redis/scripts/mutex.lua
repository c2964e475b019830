-- Prelude of the scripts that hand a mutex to a waiter.
--
-- KEYS: mutex, queue, fence
-- calls: set incr time lpop publish pttl lrange

-- Hands the mutex to the first waiter in the queue that can be reached. Returns the waiter's time to live (in a
-- cluster that of its claim), or nil if no waiter was reached. Stops at the token `asking`, removes its place and
-- returns nil, true: that caller takes the mutex itself. Passes over `leaving`, which may have a place from a take
-- that arrived late. A place is a token and its time to live, 0 for none. If the call reaches its bounds, the mutex
-- stays free, as it is after a holder's death: the next TAKE by any client continues, even if the client that must
-- call again dies.
local function pass_on(asking, leaving)
  local before
  local place = next_place()
  while place do
    local node = string.sub(place, 1, 32)
    if asking and string.sub(place, 1, 65) == asking then
      settle()
      return nil, true
    end
    local token, ttl
    if not dead[node] then
      token, ttl = string.sub(place, 1, 65), string.sub(place, 66)
    end
    if tonumber(ttl) and token ~= leaving then
      -- Each waiter gets a new fence: a waiter that was passed over may still receive its grant, if it is connected
      -- to another server.
      local fence = next_fence()
      before = before or redis.call('PTTL', KEYS[1])
      -- The mutex is written first: if the message is lost, the waiter's next TAKE still finds that it is the holder.
      if spread then
        -- `tostring` would write the claim for a time to live of 12,700 years as 1e+14, which the server does not accept.
        ttl = ttl == '0' and '1000' or string.format('%.0f', claim_of(tonumber(ttl)))
        given[node] = true
      end
      give(token, ttl)
      -- Each part of the fence fits into an integer on any server, and the two take half as long to format as the whole would.
      local low = fence % 100000000
      local grant = 'm' .. token .. string.format('%08d%08d', (fence - low) / 100000000, low) .. KEYS[1]
      if tell(node, grant) then
        settle()
        -- The other waiters sleep until the end that the previous holder, possibly a foreign one, had.
        if ttl ~= '0' and (before < 0 or tonumber(ttl) < before) then
          tell_sooner()
        end
        return ttl
      end
    end
    place = next_place()
  end
  settle()
  return nil
end
