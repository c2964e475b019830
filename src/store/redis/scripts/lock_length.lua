-- Prelude of the scripts that read a holder's remaining time.
--
-- calls:

-- The longest time in ms for which the holder with this token wants the lock; nil if the token does not contain it. It does,
-- in the first 8 digits of its second half, if that half is a UUID of version 8. The tokens of holders that want the lock
-- without an end, tokens of older versions of this crate, and foreign data do not.
local function length(token)
  return #token == 65 and string.sub(token, 46, 46) == '8' and tonumber(string.sub(token, 34, 41), 16) or nil
end

