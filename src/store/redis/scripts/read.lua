local reads_response = ARGV[1]
if not record then
    return false
end
if before == COMPLETED and reads_response == '1' then
    head = redis.call('GET', key)
end
return { now, head }
