-- LOOK: who holds the mutex, and for how long.
--
-- KEYS: mutex
-- Returns nil | {holder, remaining ms, -1 for no end}
--
-- Atomic, because the two answers would otherwise be about two holders.
-- calls: get pttl
local holder = redis.call('GET', KEYS[1])
return holder and {holder, redis.call('PTTL', KEYS[1])}
