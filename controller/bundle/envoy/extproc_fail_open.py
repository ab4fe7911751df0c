# SPDX-License-Identifier: Apache-2.0
"""The filters for requests that extproc did not decide: one reads bodies, one changes them.

Without extproc Envoy routes by the ``model`` of the body. Envoy and the engine must read the same value, so the first
filter finds the members by itself. It writes the model's name, on which routes match, and the position of each member
into metadata.

It finds the members of the outermost object as any JSON reader finds them, or refuses the request: for text that
readers may understand differently (names that occur twice or are written with escapes, text that is no object in UTF-8,
anything after it) and for text that would take long. What is nested is passed over, and not checked beyond its ends:
that is the engine's to do. Text is passed over with plain searches, which run at the speed of memory. Every position
only grows, and the number of marks is bounded, so that no body stops Envoy for long.

The second filter runs on the route that was found. It writes the engines' name of the model, and removes or refuses the
fields by which gateways control engines, as extproc does. All other values are copied byte for byte, so numbers keep
their digits.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, get_args

import msgspec
from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua, LuaPerRoute
from envoy_data_plane.google.protobuf import Struct, Value

from controller.bundle.envoy.lua import fill_placeholders
from extproc.api.model_server import InternalField, SteeringField
from extproc.wire_names import (
    ANTHROPIC_PATHS,
    ANTHROPIC_VERSION,
    APIS_BY_PATH,
    DEGRADED_SERVERS,
    MODELS_PATH,
    RESPONSE_MODEL,
    ROUTE_NAMESPACE,
    SPLICE,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# Quotation marks, brackets and braces outside of text, and what is escaped before quotation marks: several times what
# extproc lets through. A body of 16 MiB that comes to this many is refused within 0.2 s.
MOST_STEPS: Final = 1_000_000
# Fields of the whole object; APIs have about 50.
MOST_MEMBERS: Final = 1_000
# No name that matters is longer, even if all of it is escaped.
_MOST_NAME_BYTES: Final = 256

# Defines members_of(json) and unescaped(text); both raise tables with a message, see bad.
_MEMBERS_SCRIPT: Final = r"""
local find, sub, byte, match = string.find, string.sub, string.byte, string.match
local PLAIN = {['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t"}
local BEYOND = math.huge
local TOO_MUCH = "Only shorter requests can be served at the moment; try again soon."

local function bad(message, param)
  error({message = message, param = param})
end

local function not_json()
  bad("The body is not a JSON object in UTF-8; send one with at least 'model'.")
end

-- So many more marks were read. Positions only grow, so this bounds the work.
local function step(text, count)
  text.steps = text.steps - count
  if text.steps < 0 then error({message = TOO_MUCH, is_too_much = true}) end
end

-- The quotation mark that ends the string whose contents begin at "at".
local function end_of_string(text, at)
  while true do
    local quote = find(text.json, '"', at, true)
    if not quote then not_json() end
    local before = quote - 1
    while before >= at and byte(text.json, before) == 92 do before = before - 1 end
    step(text, quote - before)
    if (quote - before) % 2 == 1 then return quote end
    at = quote + 1
  end
end

-- Where the next of these marks stands; looked for only once what was found is passed.
local function next_mark(text, mark, at)
  if text[mark] < at then text[mark] = find(text.json, mark, at, true) or BEYOND end
  return text[mark]
end

-- The bracket or brace that ends the one before "at". An engine sees for itself whether they are of a kind.
local function end_of_nested(text, at)
  local depth = 1
  while true do
    local quote = next_mark(text, '"', at)
    local opens = math.min(next_mark(text, "{", at), next_mark(text, "[", at))
    local closes = math.min(next_mark(text, "}", at), next_mark(text, "]", at))
    local first = math.min(quote, opens, closes)
    if first == BEYOND then not_json() end
    step(text, 1)
    if first == quote then
      at = end_of_string(text, quote + 1) + 1
    else
      depth = depth + (first == opens and 1 or -1)
      if depth == 0 then return first end
      at = first + 1
    end
  end
end

local function end_of_value(text, at)
  local first = byte(text.json, at)
  if first == 34 then return end_of_string(text, at + 1) end
  if first == 123 or first == 91 then return end_of_nested(text, at + 1) end
  local after = match(text.json, "^[%w.+-]+()", at)
  if not after then not_json() end
  return after - 1
end

-- The members of the object: where each begins, where its value begins and ends, and its name unless that is long.
local function members_of(json)
  local text = {json = json, steps = @MOST_STEPS@, ['"'] = 0, ["{"] = 0, ["}"] = 0, ["["] = 0, ["]"] = 0}
  local found, seen = {}, {}
  local at = match(json, "^[ \t\r\n]*{[ \t\r\n]*()")
  if not at then not_json() end
  local ends = match(json, "^}[ \t\r\n]*()", at)
  while not ends do
    if byte(json, at) ~= 34 then not_json() end
    local quote = end_of_string(text, at + 1)
    local name = quote - at <= @MOST_NAME@ and sub(json, at + 1, quote - 1) or nil
    if name and find(name, "\\", 1, true) then
      bad("A field's name is written with escapes; write it plainly.")
    end
    if name and seen[name] then bad("A field occurs twice; send each field once.") end
    local value = match(json, "^[ \t\r\n]*:[ \t\r\n]*()", quote + 1)
    if not value then not_json() end
    local stop = end_of_value(text, value)
    found[#found + 1] = {name = name, start = at, value = value, stop = stop}
    if name then seen[name] = found[#found] end
    if #found > @MOST_MEMBERS@ then bad("The body has more than @MOST_MEMBERS@ fields; send fewer.") end
    local mark, after = match(json, "^[ \t\r\n]*([,}])[ \t\r\n]*()", stop + 1)
    if not mark then not_json() end
    if mark == "}" then ends = after else at = after end
  end
  if ends <= #json then not_json() end
  return found, seen
end

local function in_utf8(code)
  local function rest(shift) return string.char(128 + math.floor(code / shift) % 64) end
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(192 + math.floor(code / 64)) .. rest(1) end
  if code < 0x10000 then return string.char(224 + math.floor(code / 4096)) .. rest(64) .. rest(1) end
  return string.char(240 + math.floor(code / 262144)) .. rest(4096) .. rest(64) .. rest(1)
end

-- A string without its escapes; nil if one of them is none.
local function unescaped(text)
  local parts, at = {}, 1
  while true do
    local slash = find(text, "\\", at, true)
    parts[#parts + 1] = sub(text, at, (slash or 0) - 1)
    if not slash then return table.concat(parts) end
    local mark = sub(text, slash + 1, slash + 1)
    at = slash + 2
    if mark == "u" then
      local code = tonumber(match(text, "^%x%x%x%x", at) or "", 16)
      if not code then return nil end
      at = at + 4
      local low = tonumber(match(text, "^\\u(%x%x%x%x)", at) or "", 16)
      if code >= 0xD800 and code < 0xDC00 and low and low >= 0xDC00 and low < 0xE000 then
        code, at = 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00, at + 6
      end
      parts[#parts + 1] = in_utf8(code)
    else
      if not PLAIN[mark] then return nil end
      parts[#parts + 1] = PLAIN[mark]
    end
  end
end
"""

# Metadata with the model's name, for the routes without extproc.
FALLBACK_NAMESPACE: Final = "attache.fallback"
FALLBACK_MODEL: Final = "model"
# The host in the client's request, while the request is routed under another one.
_FALLBACK_HOST: Final = "host"
_MEMBERS: Final = "members"
NO_REFUSALS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})
# Does nothing by itself; the routes without extproc configure its changes.
CHANGES_FILTER: Final = "attache.changes_without_extproc"
_CHANGES_SCRIPT: Final = "changes"
_STEERING_FIELDS: Final[tuple[str, ...]] = get_args(SteeringField)
_INTERNAL_FIELDS: Final[tuple[str, ...]] = get_args(InternalField)
# A path up to its version, or to its first slash if it has none.
_VERSION: Final = re.compile(r"^((?:/.*)?/v\d+/|/).*$")
_MOST_MODEL_BYTES: Final = 4096
# After such a body its text is collected at once: collections come by the number of objects, not by their size.
_LARGE_BYTES: Final = 256 * 1024

_REFUSE: Final = r"""
local ANTHROPIC_TYPES = {["400"] = "invalid_request_error", ["500"] = "api_error", ["503"] = "overloaded_error"}

local function asks_anthropic(headers)
  return headers:get("@ANTHROPIC_VERSION@") or @IS_ANTHROPIC@
end

local function refuse(handle, status, kind, code, param, message)
  if asks_anthropic(handle:headers()) then
    local error = '{"error":{"type":"' .. ANTHROPIC_TYPES[status] .. '","message":"' .. message .. '"},"type":"error"}'
    return handle:respond({[":status"] = status, ["content-type"] = "application/json"}, error)
  end
  local error = '{"error":{"message":"' .. message .. '","type":"' .. kind .. '","param":' .. param
  error = error .. ',"code":' .. code .. '}}'
  handle:respond({[":status"] = status, ["content-type"] = "application/json"}, error)
end

local function refuse_request(handle, param, message)
  refuse(handle, "400", "invalid_request_error", "null", param and '"' .. param .. '"' or "null", message)
end
"""

_READ: Final = r"""
local PATHS = {@PATHS@}
local KNOWN = {@KNOWN@}
local STEERING = {@STEERING@}

-- vLLM's connectors obey what stands in extra_args, too, and vllm_xargs is passed on as such. Both are looked into as
-- text, so escapes are refused as well.
local function check_arguments(json, arguments)
  local text = arguments and sub(json, arguments.value, arguments.stop) or ""
  local is_steering = find(text, "\\u", 1, true)
  for name in pairs(STEERING) do is_steering = is_steering or find(text, name, 1, true) end
  if is_steering then
    local message = "Only requests without steering fields in vllm_xargs can be served at the moment; try again soon."
    error({message = message, is_too_much = true})
  end
end

local function check_sampling(json, sampling)
  local text = sampling and sub(json, sampling.value, sampling.stop) or ""
  if find(text, "extra_args", 1, true) or find(text, "\\u", 1, true) then
    local message = "Only requests without extra_args can be served at the moment; try again soon."
    error({message = message, is_too_much = true})
  end
end

-- The name of the model, and the members as "START STOP NAME;" for each, NAME only where it matters.
local function read(json)
  local found, seen = members_of(json)
  local model, parts = seen.model, {}
  check_sampling(json, seen.sampling_params)
  check_arguments(json, seen.vllm_xargs)
  if not model then bad("The field 'model' is missing; it is required.", "model") end
  if byte(json, model.value) ~= 34 or model.stop == model.value + 1 then
    bad("The field 'model' must be a name; GET @MODELS_PATH@ lists them.", "model")
  end
  for _, one in ipairs(found) do
    parts[#parts + 1] = one.start .. " " .. one.stop .. " " .. (KNOWN[one.name or ""] and one.name or "") .. ";"
  end
  local name = ""
  if model.stop - model.value <= @MOST_MODEL@ then
    name = unescaped(sub(json, model.value + 1, model.stop - 1)) or not_json()
  end
  return name, table.concat(parts)
end

-- A route that ends here for want of a better one names the host that has a route for each model. Engines serve more
-- than inference: what has something in front of such a path is for HTTPRoutes alone, which cut it off.
local function look_again(handle, is_for_models)
  local host = is_for_models and handle:filterContext():get("host")
  local headers = handle:headers()
  local asked = headers:get(":authority")
  if host and asked then
    handle:streamInfo():dynamicMetadata():set("@NAMESPACE@", "@HOST@", asked)
    headers:replace(":authority", host)
  end
  handle:clearRouteCache()
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local method, path = headers:get(":method"), match(headers:get(":path") or "", "^[^?]*")
  if method == "GET" and path == "@MODELS_PATH@" then return look_again(handle, true) end
  local kind = @IS_INFERENCE@
  if method ~= "POST" or not kind then return end
  if kind == "form" then
    local message = "Only JSON requests can be served at the moment; try again soon."
    return refuse(handle, "503", "service_unavailable_error", '"no_picker"', "null", message)
  end
  local body = handle:body()
  local size = body and body:length() or 0
  local fine, name, members = pcall(read, size > 0 and body:getBytes(0, size) or "")
  if size > @LARGE@ then collectgarbage() end
  if fine then
    local metadata = handle:streamInfo():dynamicMetadata()
    metadata:set("@NAMESPACE@", "@MEMBERS@", members)
    metadata:set("@NAMESPACE@", "@MODEL@", name)
    return look_again(handle, PATHS[path])
  end
  local problem = name
  if type(problem) == "table" and not problem.is_too_much then
    return refuse_request(handle, problem.param, problem.message)
  end
  if type(problem) ~= "table" then
    -- what Lua itself raises, as when it has no more memory
    handle:logErr("a body could not be read: " .. tostring(problem))
  end
  local message = type(problem) == "table" and problem.message or TOO_MUCH
  refuse(handle, "503", "service_unavailable_error", '"no_picker"', "null", message)
end
"""

_CHANGE: Final = r"""
local REFUSED = {@STEERING@}
local REMOVED = {@REMOVED@}

-- The object without some members and with another model; nil if nothing changes; or the name of a field that is
-- refused.
local function changes(members, context)
  local model, allowed = context:get("model"), context:get("allowed") or {}
  local kept, is_changed = {}, false
  for start, stop, name in string.gmatch(members, "(%d+) (%d+) (%S*);") do
    if REFUSED[name] and not allowed[name] then return nil, name end
    if REMOVED[name] and not allowed[name] then
      is_changed = true
    elseif name == "model" and model then
      is_changed = true
      kept[#kept + 1] = '"model":' .. model
    else
      kept[#kept + 1] = {start = tonumber(start), stop = tonumber(stop)}
    end
  end
  return is_changed and kept or nil
end

local function change(handle)
  local read = handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  -- an HTTPRoute sends other bodies here, too
  if not read then return end
  if read["@HOST@"] then handle:headers():replace(":authority", read["@HOST@"]) end
  local asked = handle:filterContext():get("@RESPONSE_MODEL@")
  if asked then handle:streamInfo():dynamicMetadata():set("@NAMESPACE@", "@RESPONSE_MODEL@", asked) end
  local kept, refused = changes(read["@MEMBERS@"], handle:filterContext())
  if refused then
    local message = "The field '" .. refused .. "' is for gateways, not for clients; leave it out."
    return refuse_request(handle, refused, message)
  end
  if not kept then return end
  local body = handle:body()
  local size = body:length()
  local json = body:getBytes(0, size)
  for index, one in ipairs(kept) do
    if type(one) == "table" then kept[index] = string.sub(json, one.start, one.stop) end
  end
  local degraded = handle:filterContext():get("degraded")
  if degraded then
    local first = 1
    for _, one in ipairs(kept) do
      if string.sub(one, 1, 8) == '"model":' then
        local metadata = handle:streamInfo():dynamicMetadata()
        metadata:set("@ROUTE@", "@SPLICE@", (first + 8) .. "," .. (#one - 8))
        metadata:set("@ROUTE@", "@DEGRADED@", degraded)
        for class, servers in pairs(handle:filterContext():get("refusals") or {}) do
          metadata:set("@ROUTE@", class, servers)
        end
      end
      first = first + #one + 1
    end
  end
  local length = body:setBytes("{" .. table.concat(kept, ",") .. "}")
  if handle:headers():get("content-length") then
    handle:headers():replace("content-length", tostring(length))
  end
  if size > @LARGE@ then
    json, kept = nil, nil
    collectgarbage()
  end
end

function envoy_on_request(handle)
  -- a script that fails lets the request pass as it is
  local fine, problem = pcall(change, handle)
  if not fine then
    handle:logErr("a body could not be changed: " .. tostring(problem))
    refuse(handle, "500", "server_error", '"internal_error"', "null", "The gateway failed over this request.")
  end
end
"""


def body_reading_filter(*, with_prefixes: bool = False) -> Lua:
    """The filter that reads the model's name and where the members stand; refuses what is ambiguous.

    ``with_prefixes``: the paths of inference may have something in front of them.
    """
    is_inference = "PATHS[path]"
    if with_prefixes:
        is_inference = f"({' or '.join(f'PATHS[match(path, {pattern})]' for pattern in _lua_patterns())})"
    marks = {
        "@PATHS@": ", ".join(f'["{path}"] = "{api.spec.body}"' for path, api in APIS_BY_PATH.items()),
        "@IS_INFERENCE@": is_inference,
        "@KNOWN@": _lua_set(("model", *_INTERNAL_FIELDS)),
        "@STEERING@": _lua_set(_STEERING_FIELDS),
        "@MOST_MODEL@": str(_MOST_MODEL_BYTES),
    }
    return Lua(default_source_code=_script(_REFUSE + _MEMBERS_SCRIPT + _READ, marks))


def body_change_filter() -> Lua:
    """The filter that changes bodies where ``body_change_config`` is configured for the route, which stays as it is."""
    removed = [name for name in _INTERNAL_FIELDS if name not in _STEERING_FIELDS]
    marks = {"@STEERING@": _lua_set(_STEERING_FIELDS), "@REMOVED@": _lua_set(removed)}
    return Lua(source_codes={_CHANGES_SCRIPT: _script(_REFUSE + _CHANGE, marks)}, clear_route_cache=False)


def rerouting_config(host: str) -> LuaPerRoute:
    """For the route of what no other route takes: requests without extproc are routed again, as if for ``host``."""
    return LuaPerRoute(filter_context=Struct(fields={"host": Value(string_value=host)}))


def body_change_config(
    allowed_fields: Collection[str],
    *,
    model: str | None = None,
    response_model: str | None = None,
    degraded: Collection[str] | None = None,
    refusals: Mapping[str, Collection[str]] = NO_REFUSALS,
) -> LuaPerRoute:
    """What a route changes: ``model`` in place of the client's, and no field of gateways but those allowed.

    ``response_model``: in answers, in place of the engines' name; None: that stays.
    ``degraded``: its attempts go to several ModelServers, whose filters learn where the model's name stands and, of
    these, that their answers are marked. ``refusals``: by class, the clusters of those that take what others refuse.
    """
    context: dict[str, Value] = {}
    if allowed_fields:
        allowed = {name: Value(bool_value=True) for name in sorted(allowed_fields)}
        context["allowed"] = Value(struct_value=Struct(fields=allowed))
    if model is not None:
        context["model"] = Value(string_value=msgspec.json.encode(model).decode())
    if response_model is not None:
        context[RESPONSE_MODEL] = Value(string_value=msgspec.json.encode(response_model).decode())
    if degraded is not None:
        names = {name: Value(string_value="model") for name in sorted(degraded)}
        context["degraded"] = Value(struct_value=Struct(fields=names))
    if refusals:
        taking = {one: _set_of(refusals[one]) for one in sorted(refusals)}
        context["refusals"] = Value(struct_value=Struct(fields=taking))
    return LuaPerRoute(name=_CHANGES_SCRIPT, filter_context=Struct(fields=context))


def _set_of(names: Collection[str]) -> Value:
    return Value(struct_value=Struct(fields={name: Value(bool_value=True) for name in sorted(names)}))


def _lua_patterns() -> list[str]:
    """Each takes the path of an API out of one that has something before it."""
    starts = dict.fromkeys(_VERSION.sub(r"\1", path) for path in APIS_BY_PATH)
    return [f'"^.*({start}{"[^/]*" if start == "/" else ".*"})$"' for start in starts]


def _lua_set(names: Iterable[str]) -> str:
    return ", ".join(f"{name} = true" for name in names)


def _script(script: str, marks: Mapping[str, str]) -> DataSource:
    common = {
        "@NAMESPACE@": FALLBACK_NAMESPACE,
        "@MODEL@": FALLBACK_MODEL,
        "@MEMBERS@": _MEMBERS,
        "@HOST@": _FALLBACK_HOST,
        "@MODELS_PATH@": MODELS_PATH,
        "@IS_ANTHROPIC@": " or ".join(
            f'string.find(headers:get(":path") or "", "{path}", 1, true)' for path in ANTHROPIC_PATHS
        ),
        "@ANTHROPIC_VERSION@": ANTHROPIC_VERSION,
        "@LARGE@": str(_LARGE_BYTES),
        "@RESPONSE_MODEL@": RESPONSE_MODEL,
        "@ROUTE@": ROUTE_NAMESPACE,
        "@SPLICE@": SPLICE,
        "@DEGRADED@": DEGRADED_SERVERS,
        "@MOST_STEPS@": str(MOST_STEPS),
        "@MOST_MEMBERS@": str(MOST_MEMBERS),
        "@MOST_NAME@": str(_MOST_NAME_BYTES),
    }
    return DataSource(inline_string=fill_placeholders(script, {**common, **marks}))
