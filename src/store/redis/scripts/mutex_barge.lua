-- BARGE: takes the mutex if it is free, whichever tokens wait; else, if asked, takes a place in the queue, behind
-- the moment of its arrival.
--
-- KEYS: mutex, queue, fence; the mark of a head that was told, if this token has asked before
-- ARGV: token; time to live in ms, or '0' for none; '1' to queue; '1' if this token has asked before
-- Returns the fence | -2 - remaining ms of the holder, -1 for no end | {the same, 0, remarks as of TAKE}
--
-- Atomic, because no waiter would hear of a mutex that is freed between the failed take and the queueing.
-- calls: get set incr time del lrem pttl pexpire lpos rpush
local has_asked = ARGV[4] == '1'
if has_asked then
  -- The head has looked, so the next OFFER tells it again.
  redis.call('DEL', KEYS[4])
end
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  return give_again(ARGV[1], ARGV[2])
end
if not holder then
  local fence = next_fence()
  give(ARGV[1], ARGV[2])
  if has_asked then
    redis.pcall('LREM', KEYS[2], 1, ARGV[1] .. ARGV[2])
  end
  return fence
end
local remaining = redis.call('PTTL', KEYS[1])
local lost
if ARGV[3] == '1' then
  local time = redis.call('TIME')
  local moment = string.format('t%.0f', time[1] * 1000000 + time[2])
  lost = wait_in_queue(ARGV[1], ARGV[2], has_asked, remaining, moment)
end
local remarked = remarks(holder, remaining, lost)
return remarked and {-2 - remaining, 0, remarked} or -2 - remaining
