-- Returns what `by_owner.lua` returns.
local seen, call, time, at_least, response = ...
local NO_OWNER = string.rep('\0', 16)
local settled = before == UNKNOWN or lapsed
if fence ~= tonumber(seen) then
    return false
elseif (call == 'mark-lapsed' and before == UNKNOWN)
    or (call == 'forget' and before == RELEASED_ANY and token == NO_OWNER)
then
    -- Writes too: WAIT waits for the writes of its own connection only.
    redis.call('SETRANGE', key, '0', head)
    return ''
elseif call == 'mark-lapsed' and lapsed then
    state = UNKNOWN
    expires = now + time
    save('')
    return ''
elseif call == 'forget' then
    state = RELEASED_ANY
    token = NO_OWNER
    takeovers = 0
    expires = now + time
    save('')
    return owner
elseif call == 'happened' and settled then
    state = COMPLETED
    token = NO_OWNER
    expires = math.max(expires, now + at_least)
    save(response)
    return owner
elseif call == 'did-not-happen' and settled then
    state = RELEASED_SAME
    takeovers = 0
    expires = math.max(expires, now + at_least)
    save('')
    return owner
end
return false
