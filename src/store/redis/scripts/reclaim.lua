local seen, as, ids, lease, retention = unpack(ARGV)
local token = ids:sub(17, 32)
if record and before == IN_PROGRESS and record.token == token then
    -- The answer to an earlier call of this claim was lost.
    record.fence = math.max(now, record.fence + 1)
    save('')
    return { record.operation, record.fence, record.attempt, token }
end
if not record or string.format(DIGITS, record.fence) ~= seen then
    return false
end
local free = before == RELEASED_SAME or before == RELEASED_ANY
local allowed
if as == 'takeover' then
    allowed = record.lapsed
elseif as == 'expired' then
    allowed = record.expired and (before ~= IN_PROGRESS or record.lapsed)
elseif as == 'retry' then
    allowed = free and not record.expired
elseif as == 'replace' then
    allowed = before == RELEASED_ANY and not record.expired
else
    allowed = before == UNKNOWN and not record.expired
end
if not allowed then
    return false
end
if as == 'takeover' or as == 'rerun' then
    record.attempt = record.attempt + 1
    record.takeovers = record.takeovers + 1
elseif as == 'retry' then
    -- A release does not undo the run before it, whose outcome is unknown.
    record.attempt = record.attempt + 1
    record.takeovers = math.min(record.takeovers, 1)
elseif as ~= 'reconcile' then
    record.operation = ids:sub(1, 16)
    record.attempt = 1
    record.takeovers = 0
end
record.state = IN_PROGRESS
record.fence = math.max(now, record.fence + 1)
record.claimed = now
record.expires = now + retention
record.lease = now + lease
record.token = token
record.fingerprint = ids:sub(33)
save('')
return { record.operation, record.fence, record.attempt, owner }
