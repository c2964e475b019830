-- Prelude of the scripts that read a holder's remaining time.
--
-- calls:

-- The longest time in ms for which a token's holder wants the lock, if the token says so. A UUID of version 8 does, in the
-- first 8 digits of the token's second half. Other values do not: tokens of holders without an end, tokens of older
-- versions, foreign data.
local function length(token)
  return #token == 65 and string.sub(token, 46, 46) == '8' and tonumber(string.sub(token, 34, 41), 16) or nil
end

