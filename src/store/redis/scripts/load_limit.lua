-- Prelude of FREE for a load limit: a semaphore whose number of permits follows the throughput of the loads that hold them. The law is
-- `LoadLimit::end_load` in store/load_limit.rs; the contract's tests compare both.
--
-- KEYS: holders, queue, meta, the state of the law
-- ARGV: from the third, how the load has ended: 'done', 'failed' or 'refused'; the least and the greatest limit
-- calls: hmget hset hgetall del set pexpire
local nodes_at = 6

-- Counts a load of this token, and changes the limit if this load closes the window. Returns the limit, the number of processes in the
-- last window, its throughput in loads per 1,000 seconds (0 if it was not measured), and 1 if the limit rises, else 0.
local function learn(token)
  local how, least, most = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
  local slot = 'p' .. tonumber(string.sub(token, 1, 2), 16) % 64
  local fields = {'limit', 'up', 'fast', 'last', 'nodes', 'begun', 'done', 'ended', 'full', slot, 'limits', 'rates', 'both', 'spread'}
  local law = redis.call('HMGET', KEYS[4], unpack(fields))
  for at = 1, #fields do
    law[at] = tonumber(law[at])
  end
  local limit, up, fast = law[1] or capacity, law[2] or 1, law[3] or 1
  local last, nodes, begun = law[4] or 0, law[5] or 1, law[6] or now
  local done = (law[7] or 0) + (how == 'done' and 1 or 0)
  local ended, full = (law[8] or 0) + 1, (law[9] or 0) + (waiting and 1 or 0)
  local limits, rates, both, spread = law[11] or 0, law[12] or 0, law[13] or 0, law[14] or 0
  local balance = (law[10] or 0) + (how == 'failed' and 1 or how == 'done' and -1 or 0)
  local span = now - begun
  redis.call('HSET', KEYS[4], 'limit', limit, 'up', up, 'fast', fast, 'last', last, 'nodes', nodes, 'begun', begun, 'done', done,
    'ended', ended, 'full', full, slot, balance)
  -- A window ends without a result if the server's clock was set back, or if nothing runs or waits: the time without loads would
  -- count as a low throughput.
  local broken = span < 0 or holding == 0 and not waiting
  if broken or span >= 500 and (ended >= 40 or span >= 4000) then
    local failing, seen = 0, 0
    local state = redis.call('HGETALL', KEYS[4])
    for at = 1, #state, 2 do
      if string.find(state[at], '^p%d') then
        seen = seen + 1
        failing = failing + (tonumber(state[at + 1]) > 0 and 1 or 0)
      end
    end
    if broken then
      last = 0
    elseif failing * 2 > seen then
      limit, up, fast, last, nodes = math.floor(limit * 0.6), 1, 1, 0, seen
    elseif full * 2 < ended then
      last, nodes = 0, seen
    else
      local throughput = done * 1000000 / span
      if last > 0 and fast == 0 then
        local of_limit, of_rate = limit - limits, throughput - rates
        limits, rates = limits + of_limit / 2, rates + of_rate / 2
        both, spread = (both + of_limit * of_rate) / 2, (spread + of_limit * of_limit) / 2
        up = both * limits > 0.05 * spread * rates and 1 or 0
      else
        if last > 0 and throughput / last < 1.25 then
          fast, up = 0, throughput / last >= 1.04 and 1 or 0
        end
        limits, rates, both, spread = limit, throughput, 0, 0
      end
      last, nodes = throughput, seen
      -- By one permit at least: a small limit would not move at all.
      if up == 1 then
        limit = math.max(limit + 1, math.floor(limit * (fast == 1 and 1.5 or 1.15)))
      else
        limit = math.min(limit - 1, math.floor(limit / 1.15))
      end
    end
    limit = math.max(least, math.min(limit, most))
    -- At the lowest limit the only way is up.
    up = limit == least and 1 or up
    redis.call('DEL', KEYS[4])
    redis.call('HSET', KEYS[4], 'limit', limit, 'up', up, 'fast', fast, 'last', last, 'nodes', nodes, 'begun', now,
      'limits', limits, 'rates', rates, 'both', both, 'spread', spread)
  end
  redis.call('PEXPIRE', KEYS[4], idle)
  if limit ~= capacity then
    capacity = limit
    local meta = string.format('1 %.0f %.0f %.0f', created_with, capacity - created_with, idle)
    redis.call('SET', KEYS[3], meta, 'PX', idle)
  end
  return {limit, nodes, math.floor(last), up}
end
