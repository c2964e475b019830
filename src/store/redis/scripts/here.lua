-- Prelude of the scripts that give a lock or a lease to a waiter, on a single server: all subscribers
-- are connected to this server, so the reply to PUBLISH counts them all.
--
-- calls:
local spread = false
