-- Prelude of the scripts that give a lock to a waiter, on a single server: all subscribers are
-- connected to this server.
--
-- calls:
local spread = false
