-- WAITING: lists the waiters of a node that have a place in a lock's queue, among the next thousand places.
--
-- KEYS: the lock's key, its queue
-- ARGV: node; how many places earlier calls have looked at
-- Returns {1 there may be more | 0 these were the last, tokens}
--
-- This is a script, because the places of other nodes need not travel. A place that is removed between two calls moves the
-- places behind it forward, so a call may miss a place; its waiter then sends a TAKE that it would not need.
-- calls: lrange
local places = redis.pcall('LRANGE', KEYS[2], ARGV[2], ARGV[2] + 999)
-- Foreign data counts as an empty queue.
if places.err then
  return {0}
end
local waiting = {#places == 1000 and 1 or 0}
for _, place in ipairs(places) do
  if string.sub(place, 1, 32) == ARGV[1] then
    waiting[#waiting + 1] = string.sub(place, 1, 65)
  end
end
return waiting
