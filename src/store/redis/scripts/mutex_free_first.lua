-- Prelude of FREE and OFFER: a mutex for which no token waits. It comes before the preludes that only the other cases need, because
-- each function and table of those is made anew at every call, in a tenth of a call's time.
--
-- KEYS: mutex, queue
-- ARGV: as in those
-- calls: get exists del
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] and redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('DEL', KEYS[1])
  return 1
end

