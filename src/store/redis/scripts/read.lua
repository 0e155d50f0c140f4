local reads_response = ...
if before == COMPLETED and reads_response == '1' then
    head = redis.call('GET', key)
end
return { now, head }
