-- CHANGE of a semaphore: creates it if there is none, adds permits, sweeps leases that have ended, or
-- deletes it.
--
-- KEYS: holders, queue, meta
-- ARGV: 'ensure', 'add', 'sweep' or 'delete'; then, to create it, capacity and idle time in ms; then, to
--         add, how many permits
-- Returns nil if there is none | {capacity at creation, capacity, waiters, 1 if it was created now, how
--         many leases had ended, and for each holder its token and the remaining ms of its lease}; for
--         'delete' its state before
--         | {how many waiters were notified, 1 if it was created now, how many leases had ended, the
--         nodes that receive no messages} the caller must continue: for 'delete' with 'delete' again,
--         else with FREE
--
-- Atomic, because each added permit must go to exactly one caller, while others take and wait.
-- calls: get set del time llen lrange zremrangebyscore zcard lpop zadd zrem publish zrange pexpire
local failure = open()
if failure then
  return failure
end
local change, made = ARGV[1], 0
if not capacity then
  if change == 'sweep' or change == 'delete' then
    return false
  end
  made, capacity, created_with, idle = 1, tonumber(ARGV[2]), tonumber(ARGV[2]), tonumber(ARGV[3])
end
if change == 'add' then
  capacity = math.min(capacity + ARGV[4], 4294967295)
end
if made == 1 or change == 'add' then
  local meta = string.format('1 %.0f %.0f %.0f', created_with, capacity - created_with, idle)
  redis.call('SET', KEYS[3], meta, 'PX', idle)
end
local function to_go_on(told)
  return {told, made, recovered, table.concat(found)}
end
if change == 'delete' then
  local waiters = redis.call('LRANGE', KEYS[2], 0, 499)
  for _, waiter in ipairs(waiters) do
    redis.pcall('PUBLISH', 'sg1:i:' .. string.sub(waiter, 1, 32), 'c' .. string.sub(waiter, 1, 65))
  end
  if #waiters == 500 then
    redis.call('LPOP', KEYS[2], 500)
    return to_go_on(500)
  end
else
  serve()
  finish()
  if go_on then
    return to_go_on(0)
  end
end

local state = {created_with, capacity, redis.call('LLEN', KEYS[2]), made, recovered}
for i, part in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')) do
  state[#state + 1] = i % 2 == 1 and part or part - now
end
if change == 'delete' then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
end
return state
