-- LEAVE: removes the places of waiters that leave at one moment from a lock's queue. A place is a token and its time to
-- live or lease.
--
-- KEYS: the lock's key, its queue
-- ARGV: places
-- Returns {how many of the places were handled, then the index in ARGV of each that was in the queue}
--
-- To find one place takes time in proportion to the queue's length. So a queue that is not too long is rewritten without
-- the leaving waiters, which costs as much as to find ten places; in a longer queue, one call handles only a few.
--
-- Atomic, because a waiter that is granted the lock while its place is moved would be granted it again.
-- calls: llen lpop rpush lrem pttl pexpire
local MOST, AT_ONCE = 5000, 1000
local length = redis.pcall('LLEN', KEYS[2])
local answer = {#ARGV}
-- Foreign data counts as an empty queue.
if type(length) ~= 'number' or length == 0 then
  return answer
end

if length > MOST then
  answer[1] = math.min(#ARGV, math.max(1, math.floor(50000 / length)))
  for number = 1, answer[1] do
    if redis.call('LREM', KEYS[2], 1, ARGV[number]) == 1 then
      answer[#answer + 1] = number
    end
  end
  return answer
end

local numbers, kept = {}, {}
for number, place in ipairs(ARGV) do
  numbers[place] = number
end
local keep = redis.call('PTTL', KEYS[2])
for _ = 1, length, AT_ONCE do
  for _, place in ipairs(redis.call('LPOP', KEYS[2], AT_ONCE)) do
    local number = numbers[place]
    if number then
      -- Only the first of two equal places is removed: there are two only if a take was sent twice, and then LEAVE is, too.
      numbers[place] = nil
      answer[#answer + 1] = number
    else
      kept[#kept + 1] = place
    end
  end
end
for from = 1, #kept, AT_ONCE do
  redis.call('RPUSH', KEYS[2], unpack(kept, from, math.min(from + AT_ONCE - 1, #kept)))
end
if #kept > 0 and keep > 0 then
  redis.call('PEXPIRE', KEYS[2], keep)
end
return answer
