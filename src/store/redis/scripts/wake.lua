-- Prelude of the scripts that end a lease: tells everyone in the queue, once per node.
--
-- A refused or failed command in here must not fail the script, whose SET and DEL were done before
-- and stay done: hence pcall everywhere. A queue that cannot be read is not ours and is left alone.
-- calls: lrange publish del
local function wake(queue, payload, own, holder)
  local told = {}
  local function tell(token)
    local node = string.sub(token, 1, 32)
    if token ~= own and not told[node] then
      told[node] = true
      redis.pcall('PUBLISH', 'sg1:i:' .. node, payload)
    end
  end
  if holder then
    tell(holder)
  end
  local waiters = redis.pcall('LRANGE', queue, 0, -1)
  if waiters.err then
    return
  end
  for _, token in ipairs(waiters) do
    tell(token)
  end
  if #waiters > 0 then
    redis.pcall('DEL', queue)
  end
end

-- What stands between the braces of `sg1:?:{name}`.
local function name_of(key)
  return string.sub(key, 8, -2)
end
