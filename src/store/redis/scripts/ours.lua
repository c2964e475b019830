-- Prelude of the scripts that write or remove outcomes.
--
-- calls: strlen

-- Whether what stands there may be ours, or nothing does: other people's data is left alone.
local function may_be_ours(key)
  return type(redis.pcall('STRLEN', key)) == 'number'
end
