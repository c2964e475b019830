-- Prelude of the scripts that put a token into the queue of a mutex.
--
-- KEYS: mutex, queue
-- calls: lpos rpush pttl pexpire

-- Adds a place for the token, if it has none. `has_asked` says whether the token has sent a TAKE before; `remaining` is the
-- holder's remaining time, -1 for no end. Returns whether a token that has sent a TAKE before had lost its place.
local function wait_in_queue(token, ttl, has_asked, remaining)
  local place = token .. ttl
  local length, lost
  -- To find a place takes time in proportion to the queue's length.
  if not has_asked or not redis.call('LPOS', KEYS[2], place) then
    lost = has_asked
    length = redis.call('RPUSH', KEYS[2], place)
  end
  -- A waiter keeps the queue for at least twice the longest time until its next TAKE; so a script that hands the mutex on
  -- does not have to prolong the queue.
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

-- The remarks that a refused take adds to the remaining time: 1 if REPAIR must check that time, plus 2 if the token had
-- lost its place; nil for neither.
local function remarks(holder, remaining, lost)
  local longest = holder and length(holder)
  local doubt = longest and (remaining < 0 or remaining > longest)
  return (doubt or lost) and (doubt and 1 or 0) + (lost and 2 or 0) or nil
end

