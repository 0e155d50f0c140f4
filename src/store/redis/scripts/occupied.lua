if token == claim_token and before == IN_PROGRESS then
    -- The answer to an earlier call of this claim was lost.
    fence = math.max(now, fence + 1)
    save('')
    head = redis.call('GET', key)
elseif before == COMPLETED and reads_response == '1' then
    head = redis.call('GET', key)
end
return { now, head }
