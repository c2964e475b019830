-- Prelude of the scripts that change a value or a tag without a lease: a call that comes late changes nothing.
--
-- A node numbers its attempts at changes. An attempt that is sent after another has ended without an answer voids the earlier ones: it
-- leaves its number, and an attempt with a lower number changes nothing.
--
-- ARGV: 1 the number of the attempt; 2 for how many ms it voids earlier attempts, or '' if it voids none; 3 the latest moment to run, in
--         ms of this server's clock, or ''
-- calls: time get pexpire set

-- Returns the script's answer if this call must change nothing: {now in ms} it came after its latest moment | 0 a later attempt has
-- voided it; nil if it may make its change. `record` is the key of the node's attempts.
local function late(record)
  if ARGV[3] ~= '' then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    if now > tonumber(ARGV[3]) then
      return {now}
    end
  end
  local latest = redis.pcall('GET', record)
  if type(latest) == 'string' and (tonumber(latest) or 0) > tonumber(ARGV[1]) then
    return 0
  end
end

local function void_earlier(record)
  if ARGV[2] ~= '' then
    -- A server that is out of memory refuses a script's first write, and PEXPIRE is never refused.
    redis.call('PEXPIRE', record, ARGV[2])
    redis.call('SET', record, ARGV[1], 'PX', ARGV[2])
  end
end
