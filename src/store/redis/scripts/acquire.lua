-- ACQUIRE: answers the first that applies of an entry, an outcome, the lease, or a place in the queue.
--
-- KEYS: entry, lease, queue, outcome
-- ARGV: token; lease in ms; '=' and the first 68 bytes (they include the checksum) of the entry that the caller has seen,
--         or ''; token of the holder that the caller has waited for, or ''; '1' to queue; the latest moment to run, in ms of
--         this server's clock, or ''
-- Returns {1, entry} | {2, outcome} | {3} granted | {4, remaining ms, holder}
--         | {5, now in ms} this call came after its latest moment | {6} the entry is too large for a script; GET it
--
-- Atomic, because a commit between the look at the entry and the take of the lease would cause a second load, and a waiter
-- that queues only after the lease was released would never be woken.
-- calls: time getrange strlen get set pttl pexpire lpos rpush
if ARGV[6] ~= '' then
  -- A call that was delayed on its way would grant the lease to a client that has given up, and all others would wait for
  -- that client.
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if now > tonumber(ARGV[6]) then
    return {5, now}
  end
end
-- Only the head is read first: a script copies what it reads, and copies it again to return it. For 1 MiB that takes more
-- than a millisecond.
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

-- An outcome is the token of the holder that left it, 10 digits, 10 more digits with the outcome's whole lifetime, and the
-- payload. (Older versions left out the lifetime where the outcome is never replayed; no payload begins with digits.) A
-- caller that did not wait for that holder reads the outcome only while at least as many milliseconds of its lifetime remain
-- as the first 10 digits say.
local outcome = redis.pcall('GET', KEYS[4])
if type(outcome) == 'string' and #outcome >= 75 then
  local ended_by = string.sub(outcome, 1, 65)
  local replayed_until = tonumber(string.sub(outcome, 66, 75))
  local whole = tonumber(string.match(outcome, '^%d%d%d%d%d%d%d%d%d%d', 76))
  local left = redis.call('PTTL', KEYS[4])
  if replayed_until and whole and (left < 0 or left > whole) then
    -- The server's clock was set back, or the expiry was removed (PERSIST). A failure must not be replayed to newcomers for
    -- an hour. The callers that waited for that holder may still read the outcome, until the new expiry.
    left = math.min(whole, replayed_until - 1)
    redis.call('PEXPIRE', KEYS[4], left)
  end
  if ended_by == ARGV[4] or replayed_until and left >= replayed_until then
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

-- A token contains the longest duration of its lease, in milliseconds, in the first 8 digits of its second half, if that
-- half is a UUID of version 8. (Older versions of this crate used version 4.)
local longest = string.sub(holder, 46, 46) == '8' and tonumber(string.sub(holder, 34, 41), 16)
local remaining = redis.call('PTTL', KEYS[2])
if remaining < 0 or longest and remaining > longest then
  -- The expiry was removed (PERSIST), or the server's clock was set back: no lease may outlive its holder by more than one
  -- lease. The holder's duration counts, not the caller's, because a live holder renews after each third of its own lease.
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
