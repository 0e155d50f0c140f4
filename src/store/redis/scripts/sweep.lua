-- Sweeps the record of the claim with this token.
local token, retention = unpack(ARGV)
if not was_open or record.token ~= token then
    return 'other'
elseif not record.expired or (before == IN_PROGRESS and not record.lapsed)
    -- The clock was set back: the next claim needs a larger fence.
    or now <= record.fence
then
    return 'kept'
elseif before == UNKNOWN then
    redis.call('DEL', key)
    return 'removed'
end
record.state = UNKNOWN
record.expires = now + retention
save('')
return 'marked'
