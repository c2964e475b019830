-- TAKE: the mutex, if it is free and nobody is before the token; else, if asked, a place in its queue.
--
-- KEYS: mutex, queue, fence
-- ARGV: token; time to live in ms, or '0' for none; '1' to queue; '1' if it has asked before
-- Returns its fence | {remaining ms of who holds it, -1 for no end}
--
-- Atomic, because a mutex that is freed between failing to take it and queueing would be heard of by
-- nobody, and one that is free for a moment would go to whoever comes by.
-- calls: exists get set incr time lpop publish pttl pexpire lrange lpos rpush
local there = redis.call('EXISTS', KEYS[1], KEYS[2])
local holder = false
if there > 0 then
  holder = redis.call('GET', KEYS[1])
  if holder == ARGV[1] then
    if ARGV[2] == '0' then
      give(ARGV[1], '0')
    else
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    local fence = redis.pcall('GET', KEYS[3])
    return type(fence) == 'string' and tonumber(fence) or next_fence()
  end
end
if not holder and (there == 0 or not pass_on(ARGV[1])) then
  local fence = next_fence()
  give(ARGV[1], ARGV[2])
  return fence
end

local remaining = redis.call('PTTL', KEYS[1])
if ARGV[3] == '1' then
  local place = ARGV[1] .. ARGV[2]
  local length
  -- Looking for its place takes the longer the more there are that wait.
  if ARGV[4] == '0' or not redis.call('LPOS', KEYS[2], place) then
    length = redis.call('RPUSH', KEYS[2], place)
  end
  local ttl = tonumber(ARGV[2])
  keep_queue((ttl == 0 or remaining < 0) and 0 or math.max(ttl, remaining), length)
end
return {remaining}
