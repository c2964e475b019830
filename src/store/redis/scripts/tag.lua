-- TAG: returns the id of a tag, and creates it if there is none.
--
-- KEYS: tag
-- ARGV: the id to create; the lifetime in ms that the id has at least from now on
-- Returns the id
--
-- Atomic, because two loads that each created an id would invalidate one another's values.
-- calls: get set pttl pexpire
local id = redis.call('GET', KEYS[1])
if not id then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return ARGV[1]
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return id
