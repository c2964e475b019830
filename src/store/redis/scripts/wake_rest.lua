-- WAKE REST: continues to notify the processes that waited when a lease ended, up to the fence behind their
-- places.
--
-- KEYS: queue
-- ARGV: token in the fence, which is not notified; the start of the message, to which the name is appended
-- Returns 1 all are notified | 11 places are left
--
-- Atomic, because a place that is read and only removed in a later step may be another token's by then.
-- calls: lpos lpop lrange rpush publish
local last = redis.pcall('LPOS', KEYS[1], fence(ARGV[1]))
if type(last) ~= 'number' then
  -- The script that ended a later lease has notified them, or the queue has expired.
  return 1
end
tell_first(KEYS[1], math.min(last + 1, PLACES), ARGV[2] .. name_of(KEYS[1]), ARGV[1])
return last < PLACES and 1 or 11
