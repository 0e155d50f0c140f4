local claim_operation, claim_token, claim_fingerprint, claim_lease, retention, seen, as = ...
if before == IN_PROGRESS and token == claim_token then
    -- The answer to an earlier call of this claim was lost.
    fence = math.max(now, fence + 1)
    save('')
    return { operation, fence, attempt, token }
end
local free = before == RELEASED_SAME or before == RELEASED_ANY
local allowed
if as == 'takeover' then
    allowed = lapsed
elseif as == 'expired' then
    allowed = expired and (before ~= IN_PROGRESS or lapsed)
elseif as == 'retry' then
    allowed = free and not expired
elseif as == 'replace' then
    allowed = before == RELEASED_ANY and not expired
else
    allowed = before == UNKNOWN and not expired
end
if not allowed or fence ~= tonumber(seen) then
    return false
end
if as == 'takeover' or as == 'rerun' then
    attempt = attempt + 1
    takeovers = takeovers + 1
elseif as == 'retry' then
    -- A release does not undo the run before it, whose outcome is unknown.
    attempt = attempt + 1
    takeovers = math.min(takeovers, 1)
elseif as ~= 'reconcile' then
    operation = claim_operation
    attempt = 1
    takeovers = 0
end
state = IN_PROGRESS
fence = math.max(now, fence + 1)
claimed = now
expires = now + retention
lease = now + claim_lease
token = claim_token
fingerprint = claim_fingerprint
save('')
return { operation, fence, attempt, owner }
