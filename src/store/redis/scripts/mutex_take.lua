-- TAKE: gives the token the mutex, if it is free and no waiter is before the token; else, if requested, a place in its
-- queue. Before that, if requested, does FREE of another token.
--
-- KEYS: mutex, queue, fence; in a cluster the roll
-- ARGV: token; time to live in ms, or '0' for none; '0' not to queue; '1' if this token has sent a TAKE before; optionally
--         the token to be freed, whose time to live in the queue is the same, or ''; then the nodes that receive no messages
-- Returns the fence | -2 - remaining ms of the holder, -1 for no end; with a token to be freed
--         {the same, 1 that token held the mutex | 0 it did not}; with remarks
--         {-2 - remaining ms, 1 | 0, 1 REPAIR must check that time | 2 the token had lost its place | 3 both};
--         {0, 1 | 0, the nodes that receive no messages} the caller must call again, with nothing to be freed
--
-- Atomic, because no waiter would be notified of a mutex that is freed between the failed take and the queueing, and any
-- newcomer could take a mutex that is free for a moment.
-- calls: get set del incr time lpop publish pttl pexpire lrange lpos rpush lrem
local old, was_held = ARGV[5] ~= '' and ARGV[5], 0
if spread then
  answer_roll(string.sub(ARGV[1], 1, 32))
end
if holder == ARGV[1] then
  local fence = give_again(ARGV[1], ARGV[2])
  return old and {fence, 0} or fence
end
if holder and holder == old then
  holder, was_held = false, 1
elseif old then
  redis.pcall('LREM', KEYS[2], 1, old .. ARGV[2])
end
local remaining
if holder then
  remaining = redis.call('PTTL', KEYS[1])
else
  -- Not handed on if there is no queue: after an LPOP, even of nothing, a server short of memory lets the later writes through.
  local heir, is_head
  if was_held == 1 or has_queue then
    know(ARGV[6])
    if spread and was_held == 0 then
      longest_claim = 500
      close_roll()
    end
    heir, is_head = pass_on(ARGV[1], was_held == 1 and old)
    if go_on then
      redis.call('DEL', KEYS[1])
      return {0, was_held, table.concat(found)}
    end
  end
  if not heir then
    local fence = next_fence()
    give(ARGV[1], ARGV[2])
    if is_head and ARGV[2] ~= '0' then
      -- The waiters behind this token may still sleep until the end of a holder that has vanished.
      tell_sooner(true)
    end
    return old and {fence, was_held} or fence
  end
  remaining = heir == '0' and -1 or tonumber(heir)
  if spread and was_held == 0 then
    call_roll(remaining)
  end
end

local lost = ARGV[3] ~= '0' and wait_in_queue(ARGV[1], ARGV[2], ARGV[4] == '1', remaining)
local remarked = remarks(holder, remaining, lost)
if remarked then
  return {-2 - remaining, was_held, remarked}
end
return old and {-2 - remaining, was_held} or -2 - remaining
