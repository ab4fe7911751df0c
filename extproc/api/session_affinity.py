# SPDX-License-Identifier: Apache-2.0
"""Parameters of llm-d's session affinity plugins, and the headers that carry their tokens."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from extproc.api.spec import HEADER_OR_EMPTY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.config_snapshot import Snapshot

SESSION_PLUGINS: Final = frozenset(
    {"session-affinity-filter", "session-affinity-scorer", "multicluster-session-affinity-filter"}
)

_HeaderName = Annotated[str, msgspec.Meta(pattern=HEADER_OR_EMPTY)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]

_TOKEN_HEADER: Final = "x-session-token"  # noqa: S105 - a header's name
_DEFAULT_TTL_S: Final = 300.0
_OLDER_TTL_S: Final = 600.0
# Parameters that are accepted and not used, each with the reason.
UNUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        # of a published file, as if the token were a cookie
        **dict.fromkeys(("maxAge", "secure", "sameSite"), "no release of llm-d reads it"),
        "evictionSweepSeconds": "whether a session has been unused for too long is seen when it is looked up",
        "missThreshold": "an endpoint that has left the pool is missed at once",
    }
)
_AGENT: Final = "agent-identity"


class _Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """camelCase, unknown fields refused."""


class SessionSource(_Section, frozen=True):
    """Where a session's id is read: a request header, or data that another plugin attached to the request."""

    header: _HeaderName = ""
    attribute: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one is set."""
        if bool(self.header) == bool(self.attribute):
            raise ValueError("a source of session ids has either 'header' or 'attribute'")


class SessionIdConfig(_Section, frozen=True):
    """Of the strategy ``session_id``: the first source with an id counts."""

    sources: tuple[SessionSource, ...] = (SessionSource(header="x-session-id"),)
    eviction_ttl_seconds: _Seconds = _DEFAULT_TTL_S
    eviction_sweep_seconds: _Seconds = 10.0


class EncodedEndpointHeader(_Section, frozen=True):
    """Of the strategy ``encoded_endpoint_header``."""

    header: _HeaderName = _TOKEN_HEADER


class SessionAffinityParameters(_Section, frozen=True):
    """The parameters of both plugins. ``headerName`` and ``header``: older names of
    ``encodedEndpointHeaderConfig.header``.

    ``algorithm``, with ``evictionTtlSeconds``, and ``sessionIDProducerName`` are what was before ``strategy:
    session_id``: the session's id is in the token's header, or comes from that producer.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    profile_name: str = ""
    encoded_endpoint_header_config: EncodedEndpointHeader = EncodedEndpointHeader()
    session_id_config: SessionIdConfig = SessionIdConfig()
    header: _HeaderName = ""
    header_name: _HeaderName = ""
    session_id_producer_name: str = msgspec.field(default="", name="sessionIDProducerName")
    algorithm: Literal["", "encoded_endpoint_header", "session_id_header"] = ""
    eviction_ttl_seconds: _Seconds = 0.0

    @property
    def uses_client_ids(self) -> bool:
        """Whether clients name their sessions; otherwise answers carry a token."""
        return (
            "session_id" in self.strategy
            or self.algorithm == "session_id_header"
            or bool(self.session_id_producer_name)
        )

    @property
    def sources(self) -> tuple[SessionSource, ...]:
        """Where a session's id is read, first to last."""
        if self.session_id_producer_name:
            return (SessionSource(attribute=self.session_id_producer_name),)
        if self.algorithm == "session_id_header":
            return SessionSource(header=self.token_header), SessionSource(attribute=_AGENT)
        return self.session_id_config.sources or SessionIdConfig().sources

    @property
    def token_header(self) -> str:
        """The header with the token, in lower case."""
        name = self.header or self.header_name or self.encoded_endpoint_header_config.header
        return name.lower() or _TOKEN_HEADER

    @property
    def ttl_s(self) -> float:
        """How long a session is kept that is not used; 0 means the default, as in llm-d."""
        return self.session_id_config.eviction_ttl_seconds or _DEFAULT_TTL_S

    @property
    def as_session_id_config(self) -> SessionIdConfig:
        """All of ``strategy: session_id``, in whichever form the file has it."""
        ttl_s = self.ttl_s
        if self.algorithm == "session_id_header":
            ttl_s = self.eviction_ttl_seconds or _OLDER_TTL_S
        return SessionIdConfig(self.sources, ttl_s)


def session_token_headers(snapshot: Snapshot) -> tuple[str, ...]:
    """The answers' headers that carry tokens, over all ModelServers, sorted."""
    used = {server.spec.picker_config for server in snapshot.servers}
    names = set[str | None]()
    for name, file in snapshot.picker_files.items():
        for plugin in file.config.plugins if name in used else ():
            if plugin.type in SESSION_PLUGINS:
                names.add(_token_header(plugin.parameters or {}))
    return tuple(sorted(name for name in names if name is not None))


def _token_header(given: Mapping[str, Any]) -> str | None:
    try:
        taken = {key: value for key, value in given.items() if key not in UNUSED}
        parameters = msgspec.convert(taken, SessionAffinityParameters)
    except msgspec.ValidationError:
        # extproc refuses the file with the reason
        return None
    return None if parameters.uses_client_ids else parameters.token_header
