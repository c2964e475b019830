-- TAKE of a permit: takes a free permit, if no waiter is before the token; else, if requested, takes a
-- place in the queue. Creates the semaphore if there is none.
--
-- KEYS: holders, queue, meta; in a cluster the roll
-- ARGV: token; lease in ms; '1' to queue; '1' if this token has sent a TAKE before; capacity and idle
--         time in ms, to create a semaphore with; the nodes that receive no messages
-- Returns {1 granted | 0 not granted | 2 not granted, and the token had lost its place, available
--         permits, capacity at creation, ms until the next lease ends or -1}, and last the nodes that
--         receive no messages, if the caller must call again
--
-- Atomic, because a half-created semaphore would block all callers, and a permit that is taken and not
-- yet recorded would be lost if its taker died.
-- calls: get set time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange lpos rpush
local failure = open()
if failure then
  return failure
end
if not capacity then
  redis.call('SET', KEYS[3], '1 ' .. ARGV[5] .. ' 0 ' .. ARGV[6], 'PX', ARGV[6])
  capacity, created_with, idle = tonumber(ARGV[5]), tonumber(ARGV[5]), tonumber(ARGV[6])
end
local asked = ARGV[4] == '1'
know(ARGV[7])
if spread then
  answer_roll(string.sub(ARGV[1], 1, 32))
  if recovered > 0 then
    longest_claim = 500
    close_roll()
  end
end
local granted = asked and renew(ARGV[1], ARGV[2])
granted = serve(ARGV[1]) or granted
if not granted and not go_on and capacity > holding then
  grant(ARGV[1], ARGV[2])
  granted = true
end
if not granted and not asked then
  -- The token may hold a permit: this call may have arrived after a later TAKE of the same token.
  granted = renew(ARGV[1], ARGV[2])
end
local lost
local queued = not granted and not go_on and ARGV[3] == '1'
if queued then
  local place = ARGV[1] .. ARGV[2]
  -- To find a place takes time in proportion to the queue's length.
  if not asked or not redis.call('LPOS', KEYS[2], place) then
    lost = asked
    redis.call('RPUSH', KEYS[2], place)
  end
end
if spread and recovered > 0 and next(given) then
  call_roll(longest_claim)
end
local first = finish(queued)
return {granted and 1 or lost and 2 or 0, available(), created_with, first and first - now or -1, go_on and table.concat(found) or nil}
