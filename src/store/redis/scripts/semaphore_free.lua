-- FREE of a permit: gives the permit to the head of the queue if it is still the token's; else gives up the
-- token's place in the queue.
--
-- KEYS: holders, queue, meta; of a load limit the state of the law
-- ARGV: token; the token and its lease, as in its place in the queue, or '' for no place; for a load limit the three of
--         load_limit.lua; the nodes that receive no messages
-- Returns {1 the token held a permit | 0 it did not, available permits}, to which are added: if the load was counted, what `learn` in
--         load_limit.lua returns; last the nodes that receive no messages, if the caller must call again
--
-- Atomic, because a permit must be given back once, even if several callers find that its lease has ended.
-- calls: get time llen zremrangebyscore zcard lpop zadd zrem publish zrange pexpire lrange lrem
local failure = open()
if failure then
  return failure
end
if not capacity then
  return {0, 0}
end
local held = redis.call('ZREM', KEYS[1], ARGV[1])
holding = holding - held
if held == 0 and ARGV[2] ~= '' then
  -- Only the first of two equal places is removed: there are two only if a take was sent twice, and then
  -- this FREE is sent twice, too.
  redis.call('LREM', KEYS[2], 1, ARGV[2])
end
know(ARGV[nodes_at])
-- The load is counted before the permit goes to a waiter, because the limit may become lower. A repeated FREE finds no permit, and
-- counts nothing.
local learned = learn and held == 1 and learn(ARGV[1]) or {}
serve()
finish()
local answer = {held, available(), unpack(learned)}
if go_on then
  answer[#answer + 1] = table.concat(found)
end
return answer
