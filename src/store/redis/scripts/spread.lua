-- Prelude of the scripts that give a lock or a lease to a waiter, in a cluster. Some subscribers are connected to other
-- nodes; a PUBLISH reaches them, but its reply counts only those connected here. So a waiter is not passed over if the
-- reply is 0. It gets a short claim, until it confirms that by a command; and the next process in the queue is notified,
-- so that it sends a command, and then checks again when that claim ends.
--
-- calls:
local spread = true
-- The longest claim in ms. A script that finds that a waiter to which the lock was given has died sets a lower one.
local longest_claim = math.huge
