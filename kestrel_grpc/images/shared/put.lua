local value, index, sum = KEYS[1], KEYS[2], KEYS[3]
local id, size, limit, ttl = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function bytes(member) return tonumber(string.match(member, '^(%d+):')) end
local total = tonumber(redis.call('GET', sum) or '')
if not total or redis.call('EXISTS', index) == 0 then
  total = 0
  for _, member in ipairs(redis.call('ZRANGE', index, 0, -1)) do total = total + bytes(member) end
end
local function drop(member)
  redis.call('ZREM', index, member)
  total = total - bytes(member)
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, 1000)) do drop(member) end
local own = size .. ':' .. id
if redis.call('ZSCORE', index, own) then drop(own) end
local before = redis.pcall('STRLEN', value)
if type(before) == 'number' and redis.call('ZSCORE', index, before .. ':' .. id) then drop(before .. ':' .. id) end
while total + size > limit do
  local oldest = redis.call('ZRANGE', index, 0, 0)[1]
  if not oldest then break end
  drop(oldest)
  redis.call('UNLINK', index .. ':' .. string.match(oldest, ':(.*)$'))
end
redis.call('SET', value, ARGV[1], 'PX', ttl)
redis.call('ZADD', index, now + ttl, own)
redis.call('PEXPIRE', index, ttl)
redis.call('SET', sum, total + size, 'PX', ttl)
