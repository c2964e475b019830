-- Prelude of the scripts that give a lock to a waiter, in a cluster. Some subscribers are connected to other nodes;
-- a PUBLISH reaches them but counts only those connected here. So no waiter is passed over for not being counted.
-- The waiter gets a short claim until it asks for the lock; and the next process in the queue is told to look when
-- that claim ends.
--
-- calls:
local spread = true
-- The longest claim in ms, where a waiter that was given the lock has died.
local longest_claim = math.huge
