-- ENLIST: a member onto a list that has room for so many.
--
-- KEYS: list
-- ARGV: the member, of 8 bytes; for how many there is room; the list's life in ms, from now at the least
-- Returns 1 if it is on the list, else 0
--
-- Atomic, because processes that counted by themselves would exceed the bound together.
-- calls: get set pttl pexpire
local list = redis.call('GET', KEYS[1]) or ''
for at = 1, #list, 8 do
  if string.sub(list, at, at + 7) == ARGV[1] then
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
      redis.call('PEXPIRE', KEYS[1], ARGV[3])
    end
    return 1
  end
end
if #list >= 8 * tonumber(ARGV[2]) then
  return 0
end
local left = redis.call('PTTL', KEYS[1])
redis.call('SET', KEYS[1], list .. ARGV[1], 'PX', math.max(left, tonumber(ARGV[3])))
return 1
