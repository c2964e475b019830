-- Prelude of the scripts that write or remove outcomes.
--
-- calls: strlen

-- Whether the key holds a string, which may be an outcome, or is absent. Foreign data of other types is left alone.
local function may_be_ours(key)
  return type(redis.pcall('STRLEN', key)) == 'number'
end
