-- REPAIR: cuts the time that is left of a mutex down to what its holder has asked for, where that is less: the server's
-- clock was set back since, or the expiry was taken away (PERSIST).
--
-- KEYS: mutex, the latest extension beyond what the token says
-- Returns the remaining ms of its holder, -1 for no end, -2 for no holder
--
-- Atomic, because the mutex may be another holder's by the time that its time is cut.
-- calls: get pttl pexpire
local holder = redis.call('GET', KEYS[1])
local remaining = redis.call('PTTL', KEYS[1])
local longest = holder and length(holder)
local extension = longest and redis.call('GET', KEYS[2])
if extension and string.sub(extension, 1, 65) == holder then
  local extended = tonumber(string.sub(extension, 66))
  if extended == 0 then
    return remaining
  end
  longest = math.max(longest, extended)
end
if longest and (remaining < 0 or remaining > longest) then
  remaining = longest
  redis.call('PEXPIRE', KEYS[1], longest)
end
return remaining
