-- ACQUIRE: an entry, an outcome, the lease, or a place in the queue; the first that applies.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: token; lease in ms; '=' and the first 68 bytes (the checksum is in there) of the entry that
--       was seen, or ''; token of the holder waited behind, or ''; '1' to queue; its last moment in
--       ms of this server's clock, or ''
-- Returns {1, entry} | {2, outcome} | {3} granted | {4, remaining ms, holder}
--         | {5, now in ms} it came later than that
--
-- Atomic, because a commit between looking at the entry and taking the lease would be loaded a
-- second time, and a release between failing to get the lease and queueing would never be heard of.
-- calls: time get set pttl pexpire lpos rpush
if ARGV[6] ~= '' then
  -- Held back on the way it would be granted to who has long left, and all others would wait for that.
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if now > tonumber(ARGV[6]) then
    return {5, now}
  end
end
local entry = redis.pcall('GET', KEYS[1])
if type(entry) == 'table' then
  -- Foreign data counts as no entry; COMMIT will refuse to overwrite it.
  if not string.find(entry.err, 'WRONGTYPE', 1, true) then
    return entry
  end
elseif entry and '=' .. string.sub(entry, 1, 68) ~= ARGV[3] then
  return {1, entry}
end

-- An outcome is its holder's token, 10 digits, the payload. Who was not behind that holder reads
-- it only while so many milliseconds of its life are left; and no more than the next 10 digits, if
-- there are such: of a clock that was set back by an hour, a failure is not everybody's for an hour.
local outcome = redis.pcall('GET', KEYS[4])
if type(outcome) == 'string' and #outcome >= 75 then
  local whose = string.sub(outcome, 1, 65)
  local replayed_until = tonumber(string.sub(outcome, 66, 75))
  -- No payload begins with digits. One that was written without them was so by an older version.
  local whole = tonumber(string.match(outcome, '^%d%d%d%d%d%d%d%d%d%d', 76))
  local replayed = whose == ARGV[4]
  if not replayed and replayed_until then
    local left = redis.call('PTTL', KEYS[4])
    replayed = left >= replayed_until and (not whole or left <= whole)
  end
  if replayed then
    return {2, string.sub(outcome, whole and 86 or 76)}
  end
end

local holder = redis.call('GET', KEYS[2])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return {3}
end
if not holder then
  redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2])
  return {3}
end

local remaining = redis.call('PTTL', KEYS[2])
if remaining < 0 then
  -- Somebody took its expiry away (PERSIST): no lease may last for ever.
  remaining = tonumber(ARGV[2])
  redis.call('PEXPIRE', KEYS[2], remaining)
end
if ARGV[5] == '1' then
  if not redis.call('LPOS', KEYS[3], ARGV[1]) then
    redis.call('RPUSH', KEYS[3], ARGV[1])
  end
  redis.call('PEXPIRE', KEYS[3], 2 * math.max(remaining, tonumber(ARGV[2])) + 1000)
end
return {4, remaining, holder}
