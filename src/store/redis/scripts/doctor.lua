-- DOCTOR: tries each command that the other scripts call, on a key of the caller's choice, and names the commands
-- that fail.
--
-- The key holds a string, so commands for lists, hashes and sorted sets create nothing: where they are allowed, the
-- answer is WRONGTYPE. Without the right to SET there is no such string, and commands that would create a key
-- are not tried.
-- KEYS: any. ARGV: a channel.
-- Returns {the number of clients that received the message on the channel, {for each failure the command and the
--         server's words}}
-- calls: time set get exists pttl strlen getrange pexpire incr lpos rpush lpop lrange lrem llen zadd zcard zrange zrem zremrangebyscore hset hdel hmget hgetall publish del
local key = KEYS[1]
local failed = {}
local function try(command, answer)
  if type(answer) ~= 'table' or not answer.err then
    return
  end
  local expected = string.find(answer.err, 'WRONGTYPE') or string.find(answer.err, 'not an integer')
  if not expected then
    -- Before Redis 7.0 the error begins with the line of the script at which it occurred.
    failed[#failed + 1] = command .. ' ' .. (string.gsub(answer.err, '^@user_script: *%d+: *%-?', ''))
  end
end

try('TIME', redis.pcall('TIME'))
local set = redis.pcall('SET', key, 'doctor', 'PX', 5000)
try('SET', set)
try('GET', redis.pcall('GET', key))
try('EXISTS', redis.pcall('EXISTS', key))
try('PTTL', redis.pcall('PTTL', key))
try('STRLEN', redis.pcall('STRLEN', key))
try('GETRANGE', redis.pcall('GETRANGE', key, 0, 0))
try('PEXPIRE', redis.pcall('PEXPIRE', key, 5000))
if not set.err then
  try('INCR', redis.pcall('INCR', key))
  try('LPOS', redis.pcall('LPOS', key, 'x'))
  try('RPUSH', redis.pcall('RPUSH', key, 'x'))
  try('LPOP', redis.pcall('LPOP', key))
  try('LRANGE', redis.pcall('LRANGE', key, 0, 0))
  try('LREM', redis.pcall('LREM', key, 0, 'x'))
  try('LLEN', redis.pcall('LLEN', key))
  try('ZADD', redis.pcall('ZADD', key, 1, 'x'))
  try('ZCARD', redis.pcall('ZCARD', key))
  try('ZRANGE', redis.pcall('ZRANGE', key, 0, 0))
  try('ZREM', redis.pcall('ZREM', key, 'x'))
  try('ZREMRANGEBYSCORE', redis.pcall('ZREMRANGEBYSCORE', key, 0, 1))
  try('HSET', redis.pcall('HSET', key, 'x', 'x'))
  try('HDEL', redis.pcall('HDEL', key, 'x'))
  try('HMGET', redis.pcall('HMGET', key, 'x'))
  try('HGETALL', redis.pcall('HGETALL', key))
end
local heard = redis.pcall('PUBLISH', ARGV[1], 'doctor')
try('PUBLISH', heard)
try('DEL', redis.pcall('DEL', key))
return { type(heard) == 'number' and heard or 0, failed }
