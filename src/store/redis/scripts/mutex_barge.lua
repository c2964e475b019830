-- BARGE: the mutex, if it is free, whichever tokens wait; else, if asked, a place in its queue, behind the moment of
-- its coming.
--
-- KEYS: mutex, queue, fence; if it has asked before, the mark of a head that was told
-- ARGV: token; time to live in ms, or '0' for none; '1' to queue; '1' if it has asked before
-- Returns its fence | -2 - remaining ms of the holder, -1 for no end | {that, 0, remarks as TAKE's}
--
-- Atomic, because a mutex that is freed between failing to take it and queueing would be heard of by no waiter.
-- calls: get set incr time del lrem pttl pexpire lpos rpush
local has_asked = ARGV[4] == '1'
if has_asked then
  -- The head has looked: the next OFFER tells it again.
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
