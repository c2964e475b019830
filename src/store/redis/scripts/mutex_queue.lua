-- Prelude of the scripts that put a token into the queue of a mutex.
--
-- KEYS: mutex, queue
-- calls: lpos rpush pttl pexpire

-- A place for the token, if it has none; `moment` stands before it, if there is one. What is left of the time of the
-- holder is `remaining`, -1 for no end.
local function wait_in_queue(token, ttl, has_asked, remaining, moment)
  local place = token .. ttl
  local length
  -- Looking for its place takes the longer the more there are that wait.
  if not has_asked or not redis.call('LPOS', KEYS[2], place) then
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
end

