-- Prelude of FREE for a semaphore whose number of permits does not depend on its loads.
--
-- calls:
local nodes_at, learn = 3, nil
