-- REPAIR: cuts the mutex's remaining time down to the longest that its holder has requested. It is longer if the server's
-- clock was set back since, or the expiry was removed (PERSIST).
--
-- KEYS: mutex, the latest extension that exceeds the time in the token
-- Returns the holder's remaining ms, -1 for no end, -2 for no holder
--
-- Atomic, because another token might hold the mutex by the time that PEXPIRE runs.
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
