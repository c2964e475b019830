-- Prelude of the scripts that meet a holder's remaining time.
--
-- calls:

-- For how long a token's holder wants the lock at most, in ms, if the token says so: a UUID of version 8 does, in the first
-- 8 digits of its half. Others do not: the tokens of holders without an end, those that older versions minted, foreign data.
local function length(token)
  return #token == 65 and string.sub(token, 46, 46) == '8' and tonumber(string.sub(token, 34, 41), 16) or nil
end

