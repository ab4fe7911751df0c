# SPDX-License-Identifier: Apache-2.0
"""Guards: HTTP services that may allow, refuse or change requests before an engine gets them.

Who runs the gateway says where they are (GatewayConfig), so that nobody else has extproc call addresses; the owner of a
ModelRoute says which one its requests must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from extproc.api import spec as patterns
from extproc.api.engine_connection import EngineConnection, EngineTls
from extproc.api.match_patterns import check_header_name
from extproc.api.payload_log import check_sink_url
from extproc.api.quantities import Duration, check_duration
from extproc.api.spec import CelRule, Name, NonEmpty, Spec
from extproc.hop_by_hop_headers import HOP_BY_HOP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path

# Of what frames the call, and of what it says itself.
_OWN_HEADERS: Final = HOP_BY_HOP.union(
    ("accept-encoding", "authorization", "content-encoding", "content-length", "content-type", "host")
)
_OWN_PREFIX: Final = "ce-"


class GuardService(Spec, frozen=True):
    """An HTTP service that gets each request of the ModelRoutes that name it, as a CloudEvent. ``name``: ModelRoutes
    name it so. ``url``: where it is. ``timeout``: for the whole answer; at most half of ``messageTimeout``.
    ``headers``: of clients' requests, which it gets, too; no others. ``api_key_file``: a file with the key that it
    requires, ``api_key_env``: a variable of extproc's environment with it. ``ca_file``: the authorities that sign its
    certificate, in PEM; without it, those of the system. Names of files are relative to the configuration directory.
    """

    CEL: ClassVar = (
        CelRule("!has(self.apiKeyFile) || !has(self.apiKeyEnv)", "write apiKeyFile or apiKeyEnv, not both"),
    )

    name: Name
    url: Annotated[str, msgspec.Meta(max_length=2048, pattern=patterns.NO_CONTROL)]
    timeout: Duration = Duration("500ms")
    headers: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=16)] = ()
    api_key_file: NonEmpty | None = None
    api_key_env: NonEmpty | None = None
    ca_file: NonEmpty | None = None

    @property
    def connection(self) -> EngineConnection:
        """Its TLS and its key."""
        tls = EngineTls(ca_file=self.ca_file) if self.url.startswith("https:") else None
        return EngineConnection(tls=tls, api_key_file=self.api_key_file, api_key_env=self.api_key_env)


class RouteGuard(Spec, frozen=True):
    """``name``: of a guard of the GatewayConfig. ``failure_mode``: what becomes of requests about which it does not
    answer in time: ``Close`` refuses them with 503, ``Open`` sends them on as they are.
    """

    name: Name
    failure_mode: Literal["Open", "Close"] = "Close"


def check_guards(guards: Sequence[GuardService], message_timeout: float) -> Iterator[Finding]:
    """Each has a name of its own and can be called, and Envoy waits longer than extproc. ``message_timeout``: Envoy's,
    in seconds.
    """
    names: set[str] = set()
    for index, one in enumerate(guards):
        path: Path = ("spec", "guards", index)
        if one.name in names:
            yield (*path, "name"), f"'{one.name}' is there already; give each guard a name of its own"
        names.add(one.name)
        try:
            check_sink_url(one.url)
        except ValueError as error:
            yield (*path, "url"), str(error)
        yield from check_duration(one.timeout, (*path, "timeout"))
        if 2 * one.timeout > message_timeout:
            advice = "write half of messageTimeout at most, or a longer messageTimeout"
            yield (*path, "timeout"), f"Envoy waits {message_timeout:g} s for extproc; {advice}"
        if one.api_key_file is not None and one.api_key_env is not None:
            yield path, "write apiKeyFile or apiKeyEnv, not both"
        if one.ca_file is not None and urlsplit(one.url).scheme != "https":
            yield (*path, "caFile"), "the url has no TLS; write https, or leave it out"
        for number, name in enumerate(one.headers):
            where = (*path, "headers", number)
            yield from check_header_name(name, where)
            if name.lower() in _OWN_HEADERS or name.lower().startswith(_OWN_PREFIX):
                yield where, f"'{name[:100]}' of the call is extproc's own; leave it out"
