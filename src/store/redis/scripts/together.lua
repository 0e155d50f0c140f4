end

local answers = {}
local calls = math.ceil(#KEYS / 2)
local each = #ARGV / calls
for call = 1, calls do
    local last = call * each
    -- The other calls may have been made: their callers need their answers.
    local made, answer = pcall(make, KEYS[2 * call - 1], KEYS[2 * call],
        unpack(ARGV, last - each + 1, last))
    if not made and type(answer) ~= 'table' then
        answer = redis.error_reply(answer)
    end
    answers[call] = answer
end
return answers
