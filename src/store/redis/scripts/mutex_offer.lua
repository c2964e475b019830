-- OFFER: frees the mutex for the first BARGE, if it is the token's, and tells the head of the queue; hands the mutex to a
-- head that has waited for the bound. Else gives up the token's place, and handles a mutex without a holder in the same
-- way.
--
-- KEYS: mutex, queue, fence, mark of a head that was told
-- ARGV: token; its time to live, as in its place in the queue; the bound in microseconds
-- Returns 1 the token held the mutex | 0 it did not | {the same, the nodes that do not hear} the caller must continue with
--         FREE
--
-- Atomic, because a DEL after a separate check could free another token's mutex, and a head that queues between the look at
-- the queue and the DEL would not be told.
-- calls: get del lrem lrange lpop time set incr publish pttl
local held = holder == ARGV[1] and 1 or 0
if held == 0 then
  redis.pcall('LREM', KEYS[2], 1, ARGV[1] .. ARGV[2])
  -- The leaving token may be the head that was told.
  redis.call('DEL', KEYS[4])
  if holder then
    return 0
  end
end

-- Returns the place of the head and its moment of arrival, if it has one. Removes moments whose places were given up.
local function head()
  local moment
  while places > 0 do
    local entries = redis.pcall('LRANGE', KEYS[2], 0, places == 2000 and 1 or 31)
    places = places - 16
    for at = 1, #entries do
      local number = string.match(entries[at], '^t(%d+)$')
      if not number then
        if at > 2 then
          redis.call('LPOP', KEYS[2], at - 2)
        end
        return entries[at], moment
      end
      moment = tonumber(number)
    end
    if #entries < 2 then
      return nil
    end
    redis.call('LPOP', KEYS[2], #entries - 1)
  end
  go_on = true
end

-- Tells the head, and removes heads that do not hear. A cluster cannot know that, so it tells another node, too.
local function tell_head(place)
  local message = 'r' .. KEYS[1]
  repeat
    local node = string.sub(place, 1, 32)
    if not dead[node] and tell(node, message) then
      local others = spread and redis.call('LRANGE', KEYS[2], 0, 31) or {}
      for _, other in ipairs(others) do
        if #other > 65 and string.sub(other, 1, 32) ~= node then
          tell(string.sub(other, 1, 32), message)
          break
        end
      end
      return
    end
    redis.call('LPOP', KEYS[2], 2)
    local moment
    place, moment = head()
    -- A head without a moment does not barge: the mutex must be handed to it.
    go_on = go_on or tries == 0 or place and not moment
  until go_on or not place
end

local place, moment = head()
if place and moment then
  local time = redis.call('TIME')
  local waited = time[1] * 1000000 + time[2] - moment
  local bound = tonumber(ARGV[3])
  -- If the clock was set back, no head waits for longer than the bound.
  if waited < bound and -waited < bound then
    redis.call('DEL', KEYS[1])
    -- A head is told once until it has looked, and again if it has not looked within the mark's 50 ms. A mark with more
    -- time left is from before the clock was set back.
    local token = string.sub(place, 1, 65)
    if redis.call('GET', KEYS[4]) ~= token or redis.call('PTTL', KEYS[4]) > 50 then
      redis.call('SET', KEYS[4], token, 'PX', 50)
      tell_head(place)
    end
    return go_on and {held, table.concat(found)} or held
  end
end
redis.call('DEL', KEYS[4])
if not (place and pass_on(nil, held == 1 and ARGV[1])) then
  redis.call('DEL', KEYS[1])
end
return go_on and {held, table.concat(found)} or held
