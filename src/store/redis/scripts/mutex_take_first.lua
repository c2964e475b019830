-- Prelude of TAKE for a free mutex without waiters. It comes before the preludes that only the other cases need, because
-- Lua creates their functions and tables anew at every call, which takes a tenth of the call's time.
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

