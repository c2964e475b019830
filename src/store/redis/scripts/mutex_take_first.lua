-- Prelude of TAKE: a mutex that is free and for which no token waits. It comes before the preludes that only the other cases
-- need, because each function and table of those is made anew at every call, in a tenth of a call's time.
--
-- KEYS: mutex, queue, fence
-- ARGV: as in TAKE
-- calls: get exists set incr time pexpire
local holder = redis.call('GET', KEYS[1])
local has_queue = not holder and redis.call('EXISTS', KEYS[2]) == 1
if not holder and not has_queue and (ARGV[5] or '') == '' then
  local fence = next_fence()
  give(ARGV[1], ARGV[2])
  return fence
end

