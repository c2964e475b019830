-- Prelude of the scripts that may find a lock without a holder: then a waiter that was given the lock has died, and others
-- may have died, too.
--
-- In a cluster the server cannot know which waiters receive messages, so a lock that is given to a dead waiter is lost for
-- the duration of a claim. So that this does not happen for one dead waiter after another, the script calls the roll: with
-- the next claim, it notifies all nodes in the queue. Each live node sends a TAKE before the claim ends. If that claim is not
-- taken either, the next call passes over the places of the nodes that have sent no TAKE. A live node that was paused for so
-- long has lost its places, and its waiters queue again.
--
-- The roll is a text: for each node that was notified its 32 digits, then 1 if the node has sent a TAKE since, else 0.
--
-- KEYS: the lock's key, its queue; in a cluster, fourth, the roll
-- calls: get set lrange
local roll = spread and redis.call('GET', KEYS[4]) or ''

local function answers(at)
  return string.sub(roll, at + 32, at + 32) == '1'
end

-- Records that this node is alive, if it is on the roll.
local function answer_roll(node)
  local at = string.find(roll, node, 1, true)
  if at and at % 33 == 1 and not answers(at) then
    roll = string.sub(roll, 1, at + 31) .. '1' .. string.sub(roll, at + 33)
    redis.call('SET', KEYS[4], roll, 'KEEPTTL')
  end
end

-- Counts the nodes as dead that were notified and have sent no TAKE since.
local function close_roll()
  for at = 1, #roll, 33 do
    if not answers(at) then
      dead[string.sub(roll, at, at + 31)] = true
    end
  end
end

-- Notifies the nodes in the queue that are not on the roll, so that each sends a TAKE before a claim of `claim` ms ends. The
-- nodes in `given` have received a grant, and need no other message.
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
  -- The roll outlives the claim, because it is read after the claim has ended.
  redis.call('SET', KEYS[4], table.concat(nodes), 'PX', string.format('%.0f', claim + 1000))
end

