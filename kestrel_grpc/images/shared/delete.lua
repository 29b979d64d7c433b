local member = redis.call('STRLEN', KEYS[1]) .. ':' .. ARGV[1]
if redis.call('ZREM', KEYS[2], member) == 1 then
  redis.call('DECRBY', KEYS[3], string.match(member, '^(%d+):'))
end
return redis.call('UNLINK', KEYS[1])
