-- Prelude of the scripts that write to the journal of a namespace's tags.
--
-- The journal is a sorted set of events by their numbers: each load that has begun (`l` and its id), and each tag that was invalidated
-- since (`t` and its name). It exists only while a load may be in progress that reads it at its end, and has the latest events.
--
-- calls: zrange zadd zremrangebyscore del pttl pexpire
local MOST_EVENTS = 16384

-- Notes an event. `life`: for how many ms the journal lives at least, or nil if the event is of no interest without a load.
local function note(journal, event, life)
  local number = tonumber(redis.call('ZRANGE', journal, -1, -1, 'WITHSCORES')[2])
  if not (number or life) then
    return
  end
  number = (number or 0) + 1
  redis.call('ZADD', journal, number, event)
  -- The oldest events leave. A load that is among them does not find itself, so it is not stored.
  redis.call('ZREMRANGEBYSCORE', journal, 0, number - MOST_EVENTS)
  if life and redis.call('PTTL', journal) < tonumber(life) then
    redis.call('PEXPIRE', journal, life)
  end
end

-- Notes an invalidation, which must not be lost: if there is no memory for it, no load in progress is stored.
local function note_invalidated(journal, tag)
  if not pcall(note, journal, 't' .. tag) then
    redis.call('DEL', journal)
  end
end
