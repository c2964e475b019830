-- Prelude of the scripts that change a volume's registry or its log.
--
-- The registry is a hash: `b` its random id; `m` '1' if it is mature; `t` longest term in ms; `c` number of the last
-- announcement; and for each member its node and the stamp of its last RENEW. The log is a list, the newest entry last:
-- number (16 digits), id, announcer (32 digits each), `e` or `t` and the name of a key or a tag; the base entry of a new log has
-- `-` and no name. Numbers are consecutive, so an entry is found by its distance from the newest. Ids are compared as well,
-- because a server that has lost writes uses numbers again.
--
-- KEYS: the last two are registry and log
-- calls: del lrange rpush pexpire
local REGISTRY, LOG = KEYS[#KEYS - 1], KEYS[#KEYS]
local LOG_LENGTH, LIFE = 1024, 3600000

local function entry(number, id, announcer, what)
  return string.format('%016.0f', number) .. id .. announcer .. what
end

-- Prepares the writes to a registry with the fields `known`. If there is no registry, a new one gets the id `fresh` and is not
-- mature; an existing one becomes mature if its id is `vouched`, which the caller has known for a term.
-- Returns a function that changes a field; the changed fields and their values; whether the registry is new.
local function opened(known, fresh, term, vouched)
  local changed = {}
  local function set(field, value)
    known[field] = value
    changed[#changed + 1] = field
    changed[#changed + 1] = value
  end
  local is_new = not (known.b and known.t and known.c)
  if is_new then
    set('b', fresh)
    set('m', '0')
    set('t', term)
    set('c', '0')
  elseif vouched == known.b and known.m ~= '1' then
    set('m', '1')
  end
  return set, changed, is_new
end

-- The newest `count` entries of the log, the newest last. A log that is missing, or belongs to a registry that was lost, is
-- replaced by a new one: no node's mark matches its base entry, whose id is `fresh`.
local function newest(count, number, fresh, is_new)
  if is_new then
    redis.call('DEL', LOG)
  end
  local entries = redis.call('LRANGE', LOG, -count, -1)
  if #entries == 0 then
    entries[1] = entry(number, fresh, string.rep('0', 32), '-')
    redis.call('RPUSH', LOG, entries[1])
  end
  return entries
end

local function keep()
  redis.call('PEXPIRE', REGISTRY, LIFE)
  redis.call('PEXPIRE', LOG, LIFE)
end
