-- Prelude of TAKE: a mutex that is free and for which no token waits. It comes before the preludes that only the other cases
-- need, because each function and table of those is made anew at every call, in a tenth of a call's time.
--
-- KEYS: mutex, queue, fence
-- ARGV: as in TAKE
-- calls: exists get set incr time
local present = redis.call('EXISTS', KEYS[1], KEYS[2])
if present == 0 and not ARGV[5] then
  local fence = next_fence()
  give(ARGV[1], ARGV[2])
  return fence
end
local holder = present > 0 and redis.call('GET', KEYS[1])
local has_queue = present > 0 and not holder

