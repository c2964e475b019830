-- Prelude of a script that announces nothing: in a cluster the volume is in another slot than the changed key, so ANNOUNCE is
-- a separate command.
--
-- calls:
local function announced(done)
  return done
end
