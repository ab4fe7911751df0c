# SPDX-License-Identifier: Apache-2.0
"""Callers by client certificate: a filter that writes the tenant and user of a certificate into headers.

Envoy has checked the certificate in the handshake. The script reads its names from the connection, never from a
request, and first removes what a request says of tenant and user. Envoy lets a request go on whose script has failed,
so a second filter asks for metadata that the script alone writes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.rbac.v3 import Permission, Policy, Principal, RbacAction, SourcedMetadata
from envoy_data_plane.envoy.config.rbac.v3 import Rbac as Rules
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac
from envoy_data_plane.envoy.type.matcher.v3 import MetadataMatcher, MetadataMatcherPathSegment, ValueMatcher

from extproc.protocol import TENANT, USER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.authentication import CertificateName

_NAMESPACE: Final = "attache.certificate"
_KEY: Final = "name"
_HOLE: Final = re.compile(r"\{(tenant|user)\}")
# What {tenant} and {user} do not reach over; no control character, as the names go into headers.
_ENDS: Final = {"URI": "/", "DNS": "%.", "CommonName": "/@"}

_SCRIPT: Final = """
local NAMES = {@NAMES@}

local function values_of(ssl, field)
  if field == "URI" then return ssl:uriSanPeerCertificate() end
  if field == "DNS" then return ssl:dnsSansPeerCertificate() end
  local subject = ssl:parsedSubjectPeerCertificate()
  return subject and {subject:commonName()} or {}
end

-- Tenant and user; nothing if no value fits, or two do.
local function read(ssl, one)
  local found
  for _, value in ipairs(values_of(ssl, one.field)) do
    if one.field == "DNS" then value = string.lower(value) end
    local groups = {string.match(value, one.pattern)}
    if #groups > 0 then
      if found then return nil end
      found = groups
    end
  end
  return found and (one.tenant or found[one.tenant_at]), found and found[one.user_at]
end

function envoy_on_request(handle)
  local headers = handle:headers()
  headers:remove("@TENANT@")
  headers:remove("@USER@")
  local ssl = handle:streamInfo():downstreamSslConnection()
  if not ssl or not ssl:peerCertificateValidated() then
    handle:respond({[":status"] = "401"}, "")
    return
  end
  for _, one in ipairs(NAMES) do
    local tenant, user = read(ssl, one)
    if tenant then
      headers:replace("@TENANT@", tenant)
      if user then headers:replace("@USER@", user) end
      handle:streamInfo():dynamicMetadata():set("@NAMESPACE@", "@KEY@", one.name)
      return
    end
  end
end
"""


def named_by_certificates(names: Sequence[CertificateName]) -> Lua:
    """Writes tenant and user; without a certificate 401, and no metadata if no name fits."""
    script = _SCRIPT
    for mark, text in {
        "@NAMES@": ", ".join(_entry(one) for one in names),
        "@TENANT@": TENANT,
        "@USER@": USER,
        "@NAMESPACE@": _NAMESPACE,
        "@KEY@": _KEY,
    }.items():
        script = script.replace(mark, text)
    return Lua(default_source_code=DataSource(inline_string=script))


def known_certificates() -> Rbac:
    """Lets through whom ``named_by_certificates`` has named; others get 403."""
    named = MetadataMatcher(
        filter=_NAMESPACE, path=[MetadataMatcherPathSegment(key=_KEY)], value=ValueMatcher(present_match=True)
    )
    caller = Principal(sourced_metadata=SourcedMetadata(metadata_matcher=named))
    policy = Policy(permissions=[Permission(any=True)], principals=[caller])
    return Rbac(rules=Rules(action=RbacAction.ALLOW, policies={"named": policy}))


def lua_pattern(one: CertificateName) -> str:
    """Its pattern as Lua writes it, for the whole value."""
    text = one.pattern.lower() if one.field == "DNS" else one.pattern
    pieces = _HOLE.split(text)
    # every second piece is the name of a hole
    literals = [re.sub(r"([^A-Za-z0-9\x80-\U0010ffff])", r"%\1", piece) for piece in pieces[::2]]
    return "^" + f"([^{_ENDS[one.field]}%c%z]+)".join(literals) + "$"


def _entry(one: CertificateName) -> str:
    holes = _HOLE.findall(one.pattern)
    fields = {"name": _quoted(one.name), "field": _quoted(one.field), "pattern": _quoted(lua_pattern(one))}
    if one.tenant is not None:
        fields["tenant"] = _quoted(one.tenant)
    for hole in holes:
        fields[f"{hole}_at"] = str(holes.index(hole) + 1)
    # indexing with nil would fail: 0 is never there
    for missing in {"tenant", "user"} - set(holes):
        fields[f"{missing}_at"] = "0"
    return "{" + ", ".join(f"{name} = {value}" for name, value in sorted(fields.items())) + "}"


def _quoted(text: str) -> str:
    """As a string of Lua, which spells quotes and backslashes as JSON does; there are no control characters."""
    return msgspec.json.encode(text).decode()
