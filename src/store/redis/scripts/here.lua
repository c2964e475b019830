-- Prelude of the scripts that give something to a waiter, where all who subscribe do so at this server.
--
-- calls:
local spread = false
