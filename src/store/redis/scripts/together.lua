end

local answers = {}
local calls = math.ceil(#KEYS / 2)
local each = #ARGV / calls
for call = 1, calls do
    local last = call * each
    answers[call] = make(KEYS[2 * call - 1], KEYS[2 * call], unpack(ARGV, last - each + 1, last))
end
return answers
