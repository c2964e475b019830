-- Prelude of the scripts that write or remove outcomes.
--
-- calls: strlen

-- Whether the key may be ours or is absent; foreign data is left alone.
local function may_be_ours(key)
  return type(redis.pcall('STRLEN', key)) == 'number'
end
