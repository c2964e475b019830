-- LOOK: returns the holder of the mutex and its remaining time.
--
-- KEYS: mutex
-- Returns nil it is free | {the holder's value, its remaining ms or -1 for no end}
--
-- Atomic, because the two answers could otherwise be about two holders.
-- calls: get pttl
local holder = redis.call('GET', KEYS[1])
return holder and {holder, redis.call('PTTL', KEYS[1])}
