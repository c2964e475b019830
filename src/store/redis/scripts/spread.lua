-- Prelude of the scripts that give something to a waiter, where some subscribe at other nodes of a cluster: PUBLISH
-- reaches those too, and counts only who is here. So nobody is passed over for not being heard of. What is given
-- is a claim, with a short life of its own, until the waiter asks for it; and the next in the queue is told to
-- look at that claim's end.
--
-- calls:
local spread = true
-- No claim is longer, in ms, where one that was given the lock has died.
local longest_claim = math.huge
