-- Prelude of the scripts that give a mutex away.
--
-- KEYS: mutex, queue, fence
-- calls: set incr time lpop publish pttl lrange

-- Hands the mutex to the first in the queue that can be reached; its time to live, or nil if there was
-- none. Stops at `asking`, whose place is used up then, and says so: it is there to take the mutex itself. Passes
-- over `leaving`, which may have a place from a take that came late. A waiter is its token and its
-- time to live, 0 for none. Where the call has come to its bounds, the mutex is free behind it, as it is after a
-- holder's death: whichever caller asks next goes on, also where the one that is told to go on dies.
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
      -- Of its own: who is passed over may yet hear of it, where it listens to another server.
      local fence = next_fence()
      before = before or redis.call('PTTL', KEYS[1])
      -- The mutex first: if the grant is lost, the waiter still finds itself the holder at its next
      -- TAKE.
      if spread then
        -- Not tostring: of what is longer than 12,000 years it makes 1e+14, which is no time to a server.
        ttl = ttl == '0' and '1000' or string.format('%.0f', claim_of(tonumber(ttl)))
        given[node] = true
      end
      give(token, ttl)
      -- In two parts, each of which is a whole number for any server, and half as long in the making.
      local low = fence % 100000000
      local grant = 'm' .. token .. string.format('%08d%08d', (fence - low) / 100000000, low) .. KEYS[1]
      if tell(node, grant) then
        settle()
        -- Who waits has slept on the time of the holder before, or on that of a foreign one.
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
