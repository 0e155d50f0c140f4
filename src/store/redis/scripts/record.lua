local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local key = KEYS[1]
local head = redis.call('GETRANGE', key, '0', LAST_OF_HEAD)
local record

if head ~= '' then
    if #head < HEAD or head:byte(1) ~= VERSION then
        return redis.error_reply('UNREADABLE record: version or length')
    end
    local _, state, attempt, takeovers, fence, cs, cn, es, en, ls, ln = struct.unpack(FORMAT, head)
    record = {
        state = state,
        attempt = attempt,
        takeovers = takeovers,
        fence = fence,
        claimed = cs * 1000000 + math.floor(cn / 1000),
        expires = es * 1000000 + math.floor(en / 1000),
        lease = ls * 1000000 + math.floor(ln / 1000),
        operation = head:sub(FIXED + 1, FIXED + 16),
        token = head:sub(FIXED + 17, FIXED + 32),
        fingerprint = head:sub(FIXED + 33),
    }
    record.expired = record.expires < now
    record.lapsed = state == IN_PROGRESS and record.lease < now
end
local before = record and record.state
local owner = record and record.token

local was_open = before == IN_PROGRESS or before == UNKNOWN

-- Writes the record. It lives for ever while its outcome is open, and otherwise until it
-- has expired.
local function save(response)
    local is_open = record.state == IN_PROGRESS or record.state == UNKNOWN
    local lease = record.state == IN_PROGRESS and record.lease or 0
    local cs = math.floor(record.claimed / 1000000)
    local es = math.floor(record.expires / 1000000)
    local ls = math.floor(lease / 1000000)
    local bytes = struct.pack(FORMAT, VERSION, record.state, record.attempt, record.takeovers,
        record.fence, cs, (record.claimed - cs * 1000000) * 1000,
        es, (record.expires - es * 1000000) * 1000, ls, (lease - ls * 1000000) * 1000)
        .. record.operation .. record.token .. record.fingerprint .. response
    if is_open then
        redis.call('SET', key, bytes)
    else
        local expiry = math.ceil(record.expires / 1000) + GRACE
        redis.call('SET', key, bytes, 'PXAT', string.format(DIGITS, expiry))
    end
    if before == IN_PROGRESS and record.state ~= IN_PROGRESS then
        redis.call('SPUBLISH', key, '')
    end
    -- Keeps the index, where its key was given.
    if KEYS[2] then
        local name = key:sub(#KEYS[2] + 2)
        local changes = record.token ~= owner
        if was_open and (changes or not is_open) then
            redis.call('ZREM', KEYS[2], owner .. name)
        end
        if is_open and (changes or not was_open) then
            redis.call('ZADD', KEYS[2], string.format(DIGITS, now / 1000), record.token .. name)
        end
    end
end
