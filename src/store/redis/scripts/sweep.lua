-- Sweeps the record of the claim with this token.
local token, retention = unpack(ARGV)
local open = before == IN_PROGRESS or before == UNKNOWN
if not open or record.token ~= token then
    return 'other'
elseif not record.expired or (before == IN_PROGRESS and not record.lapsed) then
    return 'kept'
elseif before == UNKNOWN then
    redis.call('DEL', key)
    return 'removed'
end
record.state = UNKNOWN
record.expires = now + retention
save('')
return 'marked'
