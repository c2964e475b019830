-- ENLIST: adds a member to a list with limited capacity.
--
-- KEYS: list
-- ARGV: the member, of 8 bytes; the list's capacity; the list's lifetime in ms, counted from its first
--         member
-- Returns 1 if the member is on the list, else 0
--
-- Atomic, because processes that counted separately would together exceed the capacity. The list's lifetime is not
-- prolonged: members whose variant is not stored any more would otherwise keep new members out for as long as
-- any member is added.
-- calls: get set
local list = redis.call('GET', KEYS[1])
if not list then
  if tonumber(ARGV[2]) < 1 then
    return 0
  end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
  return 1
end
for at = 1, #list, 8 do
  if string.sub(list, at, at + 7) == ARGV[1] then
    return 1
  end
end
if #list >= 8 * tonumber(ARGV[2]) then
  return 0
end
redis.call('SET', KEYS[1], list .. ARGV[1], 'KEEPTTL')
return 1
