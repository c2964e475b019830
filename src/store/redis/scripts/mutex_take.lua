-- TAKE: the mutex, if it is free and nobody is before the token; else, if asked, a place in its queue.
-- Before that, if asked, FREE of another token.
--
-- KEYS: mutex, queue, fence; in a cluster the roll
-- ARGV: token; time to live in ms, or '0' for none; '0' not to queue; '1' if it has asked before;
--       optionally the token to be freed, whose time to live in the queue is the same, or ''; then the nodes that do not
--       hear
-- Returns its fence | -2 - remaining ms of who holds it, -1 for no end; with a token to be freed
--         {that, 1 it held the mutex | 0 it did not}; {-2 - remaining ms, the same, 1 where REPAIR is to look at that time,
--         2 where the token had lost its place, 3 for both};
--         {0, the same, the nodes that do not hear} go on, with nothing to be freed
--
-- Atomic, because a mutex that is freed between failing to take it and queueing would be heard of by
-- nobody, and one that is free for a moment would go to whoever comes by.
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
  -- Looked for before, because a server short of memory lets through what follows an LPOP, of nothing too.
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
      -- Those behind it may have slept on the time of one that has vanished.
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
