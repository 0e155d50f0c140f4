local head = redis.pcall('GETRANGE', key, '0', LAST_OF_HEAD)
if head == '' then
    return false
elseif head.err then
    return head
elseif #head < HEAD or head:byte(1) ~= VERSION then
    return redis.error_reply('UNREADABLE record: version or length')
end
local _, state, attempt, takeovers, fence, claimed, expires, lease, operation, token =
    struct.unpack(FORMAT, head)
local fingerprint = head:sub(FIXED + 1)
local before, owner = state, token
local was_open = before == IN_PROGRESS or before == UNKNOWN
local expired = expires < now
local lapsed = before == IN_PROGRESS and lease < now

-- Writes the record. It lives for ever while its outcome is open, and otherwise until it
-- has expired.
local function save(response)
    local is_open = state == IN_PROGRESS or state == UNKNOWN
    local record = struct.pack(FORMAT, VERSION, state, attempt, takeovers, fence, claimed, expires,
        state == IN_PROGRESS and lease or 0, operation, token) .. fingerprint .. response
    if is_open then
        redis.call('SET', key, record)
    else
        redis.call('SET', key, record, 'PXAT', math.ceil(expires / 1000) + GRACE)
    end
    if before == IN_PROGRESS and state ~= IN_PROGRESS then
        redis.call('SPUBLISH', key, '')
    end
    if index then
        local name = key:sub(#index + 2)
        local stays = is_open and token == owner
        if was_open and not stays then
            redis.call('ZREM', index, owner .. name)
        end
        if is_open and not (was_open and stays) then
            redis.call('ZADD', index, now, token .. name)
        end
    end
end
