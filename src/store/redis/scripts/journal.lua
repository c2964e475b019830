-- Prelude of the scripts that write to the journal of a namespace's tags.
--
-- The journal is a hash: `n` is the number of the latest event, and each load in progress (`l` and its id) and each tag invalidated
-- since (`t` and its name) has the number of its own. It exists only while a load may be in progress that reads it at its end.
--
-- calls: hmget hset del pttl pexpire
local MOST_EVENTS = 16384

-- Notes an event. `life`: for how many ms the journal lives at least, or nil if the event is of no interest without a load.
local function note(journal, event, life)
  local number = redis.call('HMGET', journal, 'n')[1]
  if not (number or life) then
    return
  end
  number = (tonumber(number) or 0) + 1
  if number > MOST_EVENTS then
    -- The loads in progress do not find themselves in the next journal, so they are not stored.
    redis.call('DEL', journal)
    if not life then
      return
    end
    number = 1
  end
  redis.call('HSET', journal, 'n', number, event, number)
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
