-- TAKE: the mutex, if it is free and nobody is before the token; else, if asked, a place in its queue.
--
-- KEYS: mutex, queue, fence
-- ARGV: token; time to live in ms, or '0' for none; '1' to queue; '1' if it has asked before
-- Returns its fence | -2 - remaining ms of who holds it, -1 for no end
--
-- Atomic, because a mutex that is freed between failing to take it and queueing would be heard of by
-- nobody, and one that is free for a moment would go to whoever comes by.
-- calls: exists get set incr time lpop publish pttl pexpire lrange lpos rpush
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  if ARGV[2] == '0' then
    give(ARGV[1], '0')
  else
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  local fence = tonumber(redis.pcall('GET', KEYS[3]))
  return fence and fence > 1 and fence or next_fence()
end
local remaining
if holder then
  remaining = redis.call('PTTL', KEYS[1])
else
  -- EXISTS, because a server short of memory lets through what follows an LPOP, of nothing too.
  local heir = redis.call('EXISTS', KEYS[2]) == 1 and pass_on(ARGV[1])
  if not heir then
    local fence = next_fence()
    give(ARGV[1], ARGV[2])
    return fence
  end
  remaining = heir == '0' and -1 or tonumber(heir)
end

if ARGV[3] == '1' then
  local place = ARGV[1] .. ARGV[2]
  local length
  -- Looking for its place takes the longer the more there are that wait.
  if ARGV[4] == '0' or not redis.call('LPOS', KEYS[2], place) then
    length = redis.call('RPUSH', KEYS[2], place)
  end
  -- Whoever waits keeps the queue for at least twice the longest time that may pass before it asks
  -- again; so those who hand the mutex on need not.
  local ttl, keep = tonumber(ARGV[2]), 86400000
  if ttl > 0 and remaining >= 0 then
    keep = 2 * math.max(ttl, remaining) + 1000
  end
  if length == 1 or redis.call('PTTL', KEYS[2]) < keep then
    redis.call('PEXPIRE', KEYS[2], keep)
  end
end
return -2 - remaining
