-- TAKE of a permit: one that is free, once nobody is before the token; else, if asked, a place in the
-- queue. Makes the semaphore if there is none.
--
-- KEYS: holders, queue, meta; in a cluster the roll
-- ARGV: token; lease in ms; '1' to queue; '1' if it has asked before; capacity and idle time in ms, of
--       a semaphore to be made; the nodes that do not hear
-- Returns {1 granted | 0 | 2 not, and the token had lost its place, available, what it was made with, ms until the next lease ends or -1}, and last the nodes that
--         do not hear where it is to go on
--
-- Atomic, because a semaphore that is half made blocks everyone, and a permit that is taken and not
-- yet written down dies with who took it.
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
  -- Read late, after the same one that was sent again.
  granted = renew(ARGV[1], ARGV[2])
end
local lost
local queued = not granted and not go_on and ARGV[3] == '1'
if queued then
  local place = ARGV[1] .. ARGV[2]
  -- Looking for its place takes the longer the more there are that wait.
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
