local expires_in, period, records, bytes = ...
-- Adds to the usage of a scope: a hash of its periods by their ends. It goes with the last
-- of them.
local expires = now + expires_in
local rest = expires % period
local last = string.format('%.0f', rest == 0 and expires or expires - rest + period)
local periods, found = {}, redis.call('HGETALL', key)
for field = 1, #found, 2 do
    periods[found[field]] = found[field + 1]
end
local adds = records ~= '0' or bytes ~= '0'
if adds then
    local former_records, former_bytes = string.match(periods[last] or '0 0', '(%S+) (%S+)')
    periods[last] = string.format('%.0f %.0f', former_records + records, former_bytes + bytes)
    redis.call('HSET', key, last, periods[last])
end
local live, latest = {}, 0
for ends, sums in pairs(periods) do
    local left = ends - now
    if left > 0 then
        live[#live + 1] = string.format('%.0f ', left) .. sums
        latest = math.max(latest, tonumber(ends))
    else
        redis.call('HDEL', key, ends)
    end
end
if adds and latest > 0 then
    redis.call('PEXPIREAT', key, string.format('%.0f', math.ceil(latest / 1000)))
end
return live
