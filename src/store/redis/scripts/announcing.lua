-- Prelude of the scripts that announce a change to the members of a volume.
--
-- ARGV: the last six are the announcer's node; an id for the announcement; a random id; the id of a registry that the announcer
--         has known for a term, or ''; the announcer's term in ms; '1' to create a registry where there is none
-- calls: pttl hgetall hset del lrange rpush lpop pexpire publish

-- Announces `what`: `e` or `t` and a name. Returns nil if there is no registry and none is to be created; else a text: the
-- registry's id, '1' if it is mature, longest term in ms, the announcement's number, the id of the log's entry before it, then
-- node and stamp of each member but the announcer.
local function announce(what)
  local node, id, fresh, vouched, term, creates = unpack(ARGV, #ARGV - 5)
  -- A fleet without local copies has no registry, so that this is its only extra command.
  if creates ~= '1' and redis.call('PTTL', REGISTRY) == -2 then
    return nil
  end
  local all, known, members = redis.call('HGETALL', REGISTRY), {}, {}
  for i = 1, #all, 2 do
    local field = all[i]
    if #field == 1 then
      known[field] = all[i + 1]
    elseif field ~= node then
      members[#members + 1] = field
      members[#members + 1] = all[i + 1]
    end
  end
  -- PEXPIRE may be the first write of this script. A server that is out of memory refuses a script's first write if that may need
  -- memory, and no later ones; PEXPIRE is never refused.
  redis.call('PEXPIRE', REGISTRY, LIFE)
  local set, changed, is_new = opened(known, fresh, term, vouched)
  local number = tonumber(known.c)
  set('c', string.format('%.0f', number + 1))
  if type(redis.pcall('HSET', REGISTRY, unpack(changed))) == 'table' then
    -- HSET was refused all the same. The change was made, so it must not stay unannounced, and DEL is always allowed: without the
    -- registry a RENEW gives no right, or it creates a new registry and its node drops all copies. The answer describes a
    -- registry that is new and has no members, so the announcer waits for a term. By then every right that existed before this
    -- call has ended.
    redis.call('DEL', REGISTRY, LOG)
    local longest = math.max(tonumber(known.t), tonumber(term))
    return string.format('%s 0 %.0f 0 %s', fresh, longest, fresh)
  end
  local before = string.sub(newest(1, number, fresh, is_new)[1], 17, 48)
  local length = redis.call('RPUSH', LOG, entry(number + 1, id, node, what))
  if length > LOG_LENGTH then
    redis.call('LPOP', LOG, length - LOG_LENGTH)
  end
  keep()
  local message = string.format('a%016.0f%s%s%s', number + 1, id, before, node) .. what
  for i = 1, #members, 2 do
    redis.pcall('PUBLISH', 'sg1:i:' .. members[i], message)
  end
  local text = {known.b, known.m or '0', known.t, known.c, before}
  if members[1] then
    text[6] = table.concat(members, ' ')
  end
  return table.concat(text, ' ')
end

-- The result of a script that has changed the value or the tag of KEYS[1]: `done`, with the answer to the announcement if there
-- is a registry.
local function announced(done, kind)
  local audience = announce(kind .. string.sub(KEYS[1], 8, -2))
  return audience and {done, audience} or done
end
