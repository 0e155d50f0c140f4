local seen, retention = ...
-- Sweeps the record of the claim with this token.
if not was_open or token ~= seen then
    return false
elseif not expired or (before == IN_PROGRESS and not lapsed)
    -- The clock was set back: the next claim needs a larger fence.
    or now <= fence
then
    return 'kept'
elseif before == UNKNOWN then
    redis.call('DEL', key)
    return 'removed'
end
state = UNKNOWN
expires = now + retention
save('')
return 'marked'
