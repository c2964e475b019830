-- Prelude of the scripts that find a lock without a holder: one that was given it has died, and others may have.
--
-- In a cluster, where it can not be known who hears, what is given to a dead waiter is lost for as long as a claim lasts.
-- So that this is not so for one after the other, the roll is called: with the next claim, all nodes in the queue are told to
-- look. Each that lives asks before the claim ends. If that is not taken either, the places of those that have not asked are
-- passed over. A node that was paused for so long has lost them and queues again.
--
-- The roll is a text: of each node that was told, its 32 digits, and 1 if it has asked since, else 0.
--
-- KEYS: the lock's own, its queue; in a cluster, fourth, the roll
-- calls: get set lrange
local roll = spread and redis.call('GET', KEYS[4]) or ''

local function answers(at)
  return string.sub(roll, at + 32, at + 32) == '1'
end

-- Notes that this node lives, if it was told to look.
local function answer_roll(node)
  local at = string.find(roll, node, 1, true)
  if at and at % 33 == 1 and not answers(at) then
    roll = string.sub(roll, 1, at + 31) .. '1' .. string.sub(roll, at + 33)
    redis.call('SET', KEYS[4], roll, 'KEEPTTL')
  end
end

-- Takes those for dead that were told and have not asked.
local function close_roll()
  for at = 1, #roll, 33 do
    if not answers(at) then
      dead[string.sub(roll, at, at + 31)] = true
    end
  end
end

-- Tells the nodes in the queue that do not stand on the roll to look, before a claim of so many ms ends. Those that were
-- given something now are told by that.
local function call_roll(claim)
  local nodes, told = {}, {}
  for at = 1, #roll, 33 do
    local node = string.sub(roll, at, at + 31)
    nodes[#nodes + 1] = node .. (answers(at) and not given[node] and '1' or '0')
    told[node] = true
  end
  for node in pairs(given) do
    if not told[node] then
      nodes[#nodes + 1] = node .. '0'
      told[node] = true
    end
  end
  for _, place in ipairs(redis.pcall('LRANGE', KEYS[2], 0, 499)) do
    local node = string.sub(place, 1, 32)
    if #place > 65 and not told[node] and tries > 0 then
      told[node] = true
      nodes[#nodes + 1] = node .. '0'
      tell(node, 'r' .. KEYS[1])
    end
  end
  -- For longer than the claim: it is read when that has ended.
  redis.call('SET', KEYS[4], table.concat(nodes), 'PX', string.format('%.0f', claim + 1000))
end

