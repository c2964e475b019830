-- Prelude of the scripts that put a token into the queue of a mutex.
--
-- KEYS: mutex, queue
-- calls: lpos rpush pttl pexpire

-- A place for the token, if it has none; `moment` stands before it, if there is one. What is left of the time of the
-- holder is `remaining`, -1 for no end. Answers whether a token that has asked before has lost its place.
local function wait_in_queue(token, ttl, has_asked, remaining, moment)
  local place = token .. ttl
  local length, lost
  -- Looking for its place takes the longer the more there are that wait.
  if not has_asked or not redis.call('LPOS', KEYS[2], place) then
    lost = has_asked
    if moment then
      length = redis.call('RPUSH', KEYS[2], moment, place) - 1
    else
      length = redis.call('RPUSH', KEYS[2], place)
    end
  end
  -- Whoever waits keeps the queue for at least twice the longest time that may pass before it asks
  -- again; so those who hand the mutex on need not.
  local keep = 86400000
  ttl = tonumber(ttl)
  if ttl > 0 and remaining >= 0 then
    keep = 2 * math.max(ttl, remaining) + 1000
  end
  if length == 1 or redis.call('PTTL', KEYS[2]) < keep then
    redis.call('PEXPIRE', KEYS[2], keep)
  end
  return lost
end

-- What a take of a mutex that is another's answers beside the remaining time: 1 where REPAIR is to look at that, 2 where the
-- token had lost its place; nil for neither.
local function remarks(holder, remaining, lost)
  local longest = holder and length(holder)
  local doubt = longest and (remaining < 0 or remaining > longest)
  return (doubt or lost) and (doubt and 1 or 0) + (lost and 2 or 0) or nil
end

