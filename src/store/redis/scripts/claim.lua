local ids, lease, retention, reads_response = unpack(ARGV)
if not record then
    record = {
        state = IN_PROGRESS,
        attempt = 1,
        takeovers = 0,
        fence = now,
        claimed = now,
        expires = now + retention,
        lease = now + lease,
        operation = ids:sub(1, 16),
        token = ids:sub(17, 32),
        fingerprint = ids:sub(33),
    }
    save('')
    return record.fence
end
if record.token == ids:sub(17, 32) and before == IN_PROGRESS then
    -- The answer to an earlier call of this claim was lost.
    record.fence = math.max(now, record.fence + 1)
    save('')
    head = redis.call('GET', key)
end
if record.state == COMPLETED and reads_response == '1' then
    head = redis.call('GET', key)
end
return { now, head }
