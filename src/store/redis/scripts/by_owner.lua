-- Returns false if superseded. Otherwise returns the token of the claim whose outcome this
-- call has decided, or an empty string.
local seen, call, time, at_least, response = ...
local free = before == RELEASED_SAME or before == RELEASED_ANY
local releases = call == 'release-same' or call == 'release-any'
if token ~= seen then
    return false
elseif call == 'complete' and was_open then
    state = COMPLETED
    expires = math.max(claimed + time, now + at_least)
    save(response)
    return token
elseif releases and before == IN_PROGRESS then
    -- A run before may have had its effect: another request would repeat it.
    local any = call == 'release-any' and takeovers == 0
    state = any and RELEASED_ANY or RELEASED_SAME
    save('')
    return token
elseif call == 'renew' and before == IN_PROGRESS then
    lease = now + time
    save('')
    return ''
elseif call == 'mark-unknown' and before == IN_PROGRESS then
    state = UNKNOWN
    expires = now + time
    save('')
    return ''
elseif (call == 'complete' and before == COMPLETED)
    or (releases and free)
    or (call == 'mark-unknown' and before == UNKNOWN)
then
    -- Writes too: WAIT waits for the writes of its own connection only.
    redis.call('SETRANGE', key, '0', head)
    return ''
end
return false
