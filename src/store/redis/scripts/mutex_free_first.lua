-- Prelude of FREE for a mutex without waiters. It comes before the preludes that only the other cases
-- need, because Lua creates their functions and tables anew at every call, which takes a tenth of the
-- call's time.
--
-- KEYS: mutex, queue
-- ARGV: as in FREE
-- calls: get exists del
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] and redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('DEL', KEYS[1])
  return 1
end

