-- Copies request and response bodies into dynamic metadata; the file access logger writes them.
-- Chunks are streamed, never buffered: a large body is not refused, a reply is not delayed, and an
-- error in here is logged by Envoy while the call goes on.
-- Bodies above CAP bytes are counted, not copied: a big copy would hold up the worker's loop.
local CAP = 262144
local seq = 0
-- One Lua state per worker thread: the address tells the workers, and restarts, apart.
local worker = tostring({}):match("0x(%x+)") or "0"

local function body(handle)
  local chunks, count, bytes = {}, 0, 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    bytes = bytes + length
    if length > 0 and bytes <= CAP then
      count = count + 1
      chunks[count] = chunk:getBytes(0, length)
    end
  end
  if bytes == 0 or bytes > CAP then
    return bytes .. ":"
  end
  return bytes .. ":" .. handle:base64Escape(table.concat(chunks))
end

function envoy_on_request(handle)
  local text = body(handle) -- yields: every userdata taken before it is dead after it
  seq = seq + 1 -- after the yield, so that the numbers of one worker have no gap
  handle:streamInfo():dynamicMetadata():set("perennial", "q", worker .. ":" .. seq .. ":" .. text)
end

function envoy_on_response(handle)
  local text = body(handle)
  handle:streamInfo():dynamicMetadata():set("perennial", "r", text)
end
