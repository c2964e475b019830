-- ENLIST: a member onto a list that has room for so many.
--
-- KEYS: list
-- ARGV: the member, of 8 bytes; for how many there is room; the list's life in ms, from its first member on
-- Returns 1 if it is on the list, else 0
--
-- Atomic, because processes that counted by themselves would exceed the bound together. Its life is not
-- prolonged: what is on it and not stored any more would keep others out for as long as anything is.
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
