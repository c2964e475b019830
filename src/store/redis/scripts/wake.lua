-- Prelude of the scripts that end a lease: notifies the processes in the queue, each of them once.
--
-- A place is a token in the queue. One call takes a bounded number of places out of the queue, because the server
-- does nothing else meanwhile. If places are left, a fence is put behind the last of them, and WAKE REST continues up
-- to the fence: a waiter that queues after this end of the lease waits for the next one. The fence has the shape of a
-- token whose node does not exist, so that a script that does not know fences passes over it. If the client ends
-- before WAKE REST, the waiters that were not notified send an ACQUIRE when the lease would have expired, as they
-- would after a lost message.
--
-- A refused or failed command in here must not fail the script, whose SET and DEL were done before
-- and stay done: hence pcall everywhere. A queue that cannot be read is foreign data and is left alone.
-- calls: lpop lrange rpush publish
local PLACES = 500
local NO_NODE = string.rep('0', 32)

local function fence(token)
  return NO_NODE .. string.sub(token, 33)
end

-- Removes the first `places` places; notifies the holder, if one is given, and each process among the places, but none
-- for the token `own`. Returns how many places there were.
local function tell_first(queue, places, payload, own, holder)
  local told = {[NO_NODE] = true}
  local function tell(token)
    local node = string.sub(token, 1, 32)
    if token ~= own and not told[node] then
      told[node] = true
      redis.pcall('PUBLISH', 'sg1:i:' .. node, payload)
    end
  end
  if holder then
    tell(holder)
  end
  local waiters = redis.pcall('LPOP', queue, places)
  if not waiters or waiters.err then
    return 0
  end
  for _, token in ipairs(waiters) do
    tell(token)
  end
  return #waiters
end

-- Wakes the queue. Returns the script's result `done`, plus 10 if the caller must continue with WAKE REST. `ended` is
--         the token whose second half the fence has.
local function wake(done, queue, payload, ended, own, holder)
  if tell_first(queue, PLACES, payload, own, holder) < PLACES then
    return done
  end
  local rest = redis.pcall('LRANGE', queue, 0, 0)
  if rest.err or not rest[1] or type(redis.pcall('RPUSH', queue, fence(ended))) ~= 'number' then
    return done
  end
  return 10 + done
end

-- The name between the braces of `sg1:?:{name}`.
local function name_of(key)
  return string.sub(key, 8, -2)
end
