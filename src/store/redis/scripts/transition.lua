-- Returns false if superseded. Otherwise returns the token of the claim whose outcome this
-- call has decided, or an empty string.
local guard, seen, call, time, at_least, response = unpack(ARGV)
if not record or (guard == 'token' and record.token or string.format(DIGITS, record.fence)) ~= seen then
    return false
end
local free = before == RELEASED_SAME or before == RELEASED_ANY
local settled = was_open and (before == UNKNOWN or record.lapsed)

local function mark_unknown()
    record.state = UNKNOWN
    record.expires = now + time
    save('')
    return ''
end

if (call == 'complete' and before == COMPLETED)
    or ((call == 'release-same' or call == 'release-any') and free)
    or ((call == 'mark-unknown' or call == 'mark-lapsed') and before == UNKNOWN)
    or (call == 'forget' and before == RELEASED_ANY and owner == NO_OWNER)
then
    -- Writes too: WAIT waits for the writes of its own connection only.
    redis.call('SETRANGE', key, '0', head)
    return ''
elseif call == 'renew' and before == IN_PROGRESS then
    record.lease = now + time
    save('')
    return ''
elseif call == 'mark-unknown' and before == IN_PROGRESS then
    return mark_unknown()
elseif call == 'mark-lapsed' and record.lapsed then
    return mark_unknown()
elseif call == 'complete' and was_open then
    record.state = COMPLETED
    record.expires = math.max(record.claimed + time, now + at_least)
    save(response)
    return owner
elseif (call == 'release-same' or call == 'release-any') and before == IN_PROGRESS then
    -- A run before may have had its effect: another request would repeat it.
    local any = call == 'release-any' and record.takeovers == 0
    record.state = any and RELEASED_ANY or RELEASED_SAME
    save('')
    return owner
elseif call == 'forget' then
    record.state = RELEASED_ANY
    record.token = NO_OWNER
    record.takeovers = 0
    record.expires = now + time
    save('')
    return owner
elseif call == 'happened' and settled then
    record.state = COMPLETED
    record.token = NO_OWNER
    record.expires = math.max(record.expires, now + at_least)
    save(response)
    return owner
elseif call == 'did-not-happen' and settled then
    record.state = RELEASED_SAME
    record.takeovers = 0
    record.expires = math.max(record.expires, now + at_least)
    save('')
    return owner
end
return false
