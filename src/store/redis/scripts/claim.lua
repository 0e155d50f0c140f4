local claim_operation, claim_token, claim_fingerprint, claim_lease, retention, reads_response = ...
local record = struct.pack(FORMAT, VERSION, IN_PROGRESS, 1, 0, now, now, now + retention,
    now + claim_lease, claim_operation, claim_token) .. claim_fingerprint
if redis.call('SET', key, record, 'NX') then
    if index then
        redis.call('ZADD', index, now, claim_token .. key:sub(#index + 2))
    end
    return now
end
