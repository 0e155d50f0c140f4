local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local key = KEYS[1]
local head = redis.call('GETRANGE', key, '0', LAST_OF_HEAD)
local record

local function moment(secs, nanos)
    return secs * 1000000 + math.floor(nanos / 1000)
end

local function parts(moment)
    local secs = math.floor(moment / 1000000)
    return secs, (moment - secs * 1000000) * 1000
end

-- `tostring` would lose digits.
local function digits(number)
    return string.format('%.0f', number)
end

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
        claimed = moment(cs, cn),
        expires = moment(es, en),
        lease = moment(ls, ln),
        operation = head:sub(FIXED + 1, FIXED + 16),
        token = head:sub(FIXED + 17, FIXED + 32),
        fingerprint = head:sub(FIXED + 33),
    }
    record.expired = record.expires < now
    record.lapsed = state == IN_PROGRESS and record.lease < now
end
local before = record and record.state
local owner = record and record.token

local function is_open(state)
    return state == IN_PROGRESS or state == UNKNOWN
end

-- Keeps the index, where its key was given.
local function list(name)
    local opens = is_open(record.state)
    local changes = record.token ~= owner
    if is_open(before) and (changes or not opens) then
        redis.call('ZREM', KEYS[2], owner .. name)
    end
    if opens and (changes or not is_open(before)) then
        redis.call('ZADD', KEYS[2], digits(now / 1000), record.token .. name)
    end
end

-- Writes the record. It lives for ever while its outcome is open, and otherwise until it
-- has expired.
local function save(response)
    local cs, cn = parts(record.claimed)
    local es, en = parts(record.expires)
    local ls, ln = parts(record.state == IN_PROGRESS and record.lease or 0)
    local bytes = struct.pack(FORMAT, VERSION, record.state, record.attempt, record.takeovers,
        record.fence, cs, cn, es, en, ls, ln)
        .. record.operation .. record.token .. record.fingerprint .. response
    if is_open(record.state) then
        redis.call('SET', key, bytes)
    else
        redis.call('SET', key, bytes, 'PXAT', digits(math.ceil(record.expires / 1000) + GRACE))
    end
    if before == IN_PROGRESS and record.state ~= IN_PROGRESS then
        redis.call('SPUBLISH', key, '')
    end
    if KEYS[2] then
        list(key:sub(#KEYS[2] + 2))
    end
end

-- The answer to an earlier call of this claim was lost.
local function grant_again()
    record.fence = math.max(now, record.fence + 1)
    save('')
end

-- A repeated call writes too: WAIT waits for the writes of its own connection only.
local function touch()
    redis.call('SETRANGE', key, '0', head)
end
