-- ACQUIRE: an entry, an outcome, the lease, or a place in the queue; the first that applies.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: token; lease in ms; '=' and the first 68 bytes (the checksum is in there) of the entry that
--       was seen, or ''; token of the holder waited behind, or ''; '1' to queue; its last moment in
--       ms of this server's clock, or ''
-- Returns {1, entry} | {2, outcome} | {3} granted | {4, remaining ms, holder}
--         | {5, now in ms} it came later than that | {6} there is an entry too large for a script; GET it
--
-- Atomic, because a commit between looking at the entry and taking the lease would be loaded a
-- second time, and a release between failing to get the lease and queueing would never be heard of.
-- calls: time getrange strlen get set pttl pexpire lpos rpush
if ARGV[6] ~= '' then
  -- Held back on the way it would be granted to a client that has long left, and all others would wait for that.
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if now > tonumber(ARGV[6]) then
    return {5, now}
  end
end
-- The head, because a script copies what it reads, twice if it returns it: of 1 MiB for more than a millisecond.
local head = redis.pcall('GETRANGE', KEYS[1], 0, 67)
if type(head) == 'table' then
  -- Foreign data counts as no entry; COMMIT will refuse to overwrite it.
  if not string.find(head.err, 'WRONGTYPE', 1, true) then
    return head
  end
elseif head ~= '' and '=' .. head ~= ARGV[3] then
  if redis.call('STRLEN', KEYS[1]) > 65536 then
    return {6}
  end
  return {1, redis.call('GET', KEYS[1])}
end

-- An outcome is its holder's token, 10 digits, 10 digits more with the life that it was given (older versions left them out
-- where it is never replayed; no payload begins with digits), the payload. A caller that was not behind that holder
-- reads it only while so many milliseconds of its life are left, as the first digits say.
local outcome = redis.pcall('GET', KEYS[4])
if type(outcome) == 'string' and #outcome >= 75 then
  local whose = string.sub(outcome, 1, 65)
  local replayed_until = tonumber(string.sub(outcome, 66, 75))
  local whole = tonumber(string.match(outcome, '^%d%d%d%d%d%d%d%d%d%d', 76))
  local left = redis.call('PTTL', KEYS[4])
  if replayed_until and whole and (left < 0 or left > whole) then
    -- The server's clock was set back, or its expiry was taken away (PERSIST): a failure is not everybody's for an
    -- hour. The waiters behind that holder still have it, for less than newcomers would have.
    left = math.min(whole, replayed_until - 1)
    redis.call('PEXPIRE', KEYS[4], left)
  end
  if whose == ARGV[4] or replayed_until and left >= replayed_until then
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

-- A token says how long its lease is at most: in milliseconds, in the first 8 digits of the flight's half, if that is a
-- UUID of version 8. (Older versions minted version 4.)
local longest = string.sub(holder, 46, 46) == '8' and tonumber(string.sub(holder, 34, 41), 16)
local remaining = redis.call('PTTL', KEYS[2])
if remaining < 0 or longest and remaining > longest then
  -- The expiry was taken away (PERSIST), or the server's clock was set back: no lease outlives its holder by more than
  -- one lease. The holder's length and not the caller's, because a live holder renews in thirds of its own.
  remaining = longest or tonumber(ARGV[2])
  redis.call('PEXPIRE', KEYS[2], remaining)
end
if ARGV[5] == '1' then
  if not redis.call('LPOS', KEYS[3], ARGV[1]) then
    redis.call('RPUSH', KEYS[3], ARGV[1])
  end
  redis.call('PEXPIRE', KEYS[3], 2 * math.max(remaining, tonumber(ARGV[2])) + 1000)
end
return {4, remaining, holder}
