-- TAKE of a permit: one that is free, once nobody is before the token; else, if asked, a place in the
-- queue. Makes the semaphore if there is none.
--
-- KEYS: holders, queue, meta
-- ARGV: token; lease in ms; '1' to queue; capacity and idle time in ms, of a semaphore to be made
-- Returns {1 granted | 0, available, what it was made with, ms until the next lease ends or -1}
--
-- Atomic, because a semaphore that is half made blocks everyone, and a permit that is taken and not
-- yet written down dies with who took it.
-- calls: get set time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange zscore lpos rpush
local failure = open()
if failure then
  return failure
end
if not capacity then
  redis.call('SET', KEYS[3], '1 ' .. ARGV[4] .. ' 0 ' .. ARGV[5], 'PX', ARGV[5])
  capacity, created_with, idle = tonumber(ARGV[4]), tonumber(ARGV[4]), tonumber(ARGV[5])
  available = math.max(capacity - redis.call('ZCARD', KEYS[1]), 0)
end
local granted = redis.call('ZSCORE', KEYS[1], ARGV[1])
if granted then
  redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
end
granted = serve(ARGV[1]) or granted
if not granted and available > 0 then
  granted = redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
  available = available - 1
end
if not granted and ARGV[3] == '1' then
  local place = ARGV[1] .. ARGV[2]
  if not redis.call('LPOS', KEYS[2], place) then
    redis.call('RPUSH', KEYS[2], place)
  end
end
finish()
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {granted and 1 or 0, available, created_with, first and first - now or -1}
