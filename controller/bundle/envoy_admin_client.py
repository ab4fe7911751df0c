# SPDX-License-Identifier: Apache-2.0
"""Envoy's admin interface: what it uses, whether it takes requests, and that it drains."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from extproc.api.addresses import parse_endpoint
from extproc.wire_names import BACKEND_CLUSTER, SERVER_CLUSTER

# Timeout of the admin interface: while Envoy reads a bundle of thousands of routes, it does not answer for seconds.
_BUSY_S: Final = 5.0
# Largest page that is read. Queries are filtered: some lines for each listener or cluster.
_MOST_BYTES: Final = 64 * 2**20
_STATS: Final = r"\.(version_text|update_rejected|update_failure|total_listeners_active)$"
_LISTENERS, _CLUSTERS, _ROUTES = "listener_manager.lds", "cluster_manager.cds", "http.attache.rds."
_NAMES: Final = {_LISTENERS: "listeners", _CLUSTERS: "clusters", _ROUTES: "routes"}
_ACTIVE_LISTENERS: Final = "listener_manager.total_listeners_active"
_RUNNING: Final = r"^http\..*\.downstream_rq_active$"
_LISTENER_ERRORS: Final = "/config_dump?resource=dynamic_listeners&mask=name,error_state.details"
_CLUSTER_NAMES: Final = "/config_dump?resource=dynamic_active_clusters&mask=cluster.name"
# The other clusters, such as that of extproc, serve no request by themselves.
_SERVING: Final = (SERVER_CLUSTER, BACKEND_CLUSTER)
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where another process listens


class EnvoyState(msgspec.Struct, frozen=True):
    """The state of one Envoy, by its admin interface.

    ``bootstrap``: the file that it was started with. ``versions``: in use, by subscription. ``refused``: how often
    something new was refused, by subscription. ``details``: why, as far as it reports that. ``has_listeners`` and
    ``has_clusters``: it uses at least one of the bundle's, if the bundle has any.
    """

    bootstrap: str
    versions: Mapping[str, str]
    refused: Mapping[str, int]
    details: tuple[str, ...] = ()
    has_listeners: bool = True
    has_clusters: bool = True

    @property
    def missing_subscription(self) -> str:
        """Subscriptions of which it uses nothing, by the beginning of their names: it serves no request then."""
        routes = [version for name, version in self.versions.items() if name.startswith(_ROUTES)]
        if not self.has_listeners:
            return _LISTENERS
        if not self.has_clusters:
            return _CLUSTERS
        return _ROUTES if routes and not any(routes) else ""

    @property
    def serves_nothing(self) -> bool:
        """Whether it serves no request because of what it refused."""
        missing = self.missing_subscription
        return bool(missing) and any(name.startswith(missing) for name in self.refused)

    @property
    def refusal_reason(self) -> str:
        """Why it refused something, in its own words where it has any."""
        return "; ".join(self.details) or "its log says why, after 'config update rejected'"


class _Stat(msgspec.Struct, frozen=True):
    name: str = ""
    value: int | str = 0


class _Stats(msgspec.Struct, frozen=True):
    stats: list[_Stat] = []


class _Options(msgspec.Struct, frozen=True):
    config_path: str = ""


class _ServerInfo(msgspec.Struct, frozen=True):
    command_line_options: _Options = _Options()


class _ErrorState(msgspec.Struct, frozen=True):
    details: str = ""


class _Cluster(msgspec.Struct, frozen=True):
    name: str = ""


class _Resource(msgspec.Struct, frozen=True):
    """A listener or a cluster."""

    cluster: _Cluster = _Cluster()
    error_state: _ErrorState = _ErrorState()


class _Dump(msgspec.Struct, frozen=True):
    configs: list[_Resource] = []


def read_envoy_state(address: str) -> EnvoyState | None:
    """The state of the Envoy with this admin address; None if nothing that answers there is an Envoy."""
    host, port, _ = parse_endpoint(address)
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=_BUSY_S)
    try:
        return _state(connection)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):  # the decoder's error is a ValueError
        return None
    finally:
        connection.close()


def _state(connection: http.client.HTTPConnection) -> EnvoyState:
    info = msgspec.json.decode(_get(connection, "/server_info"), type=_ServerInfo)
    stats = msgspec.json.decode(_get(connection, f"/stats?format=json&filter={quote(_STATS)}"), type=_Stats).stats
    versions, refused = _versions(stats), _refused(stats)
    is_closed = _LISTENERS in versions and not any(one.value for one in stats if one.name == _ACTIVE_LISTENERS)
    listeners = _dump(connection, _LISTENER_ERRORS) if refused or is_closed else []
    lacks_clusters = versions.get(_CLUSTERS) == "" and not any(
        one.cluster.name.startswith(_SERVING) for one in _dump(connection, _CLUSTER_NAMES)
    )
    details = [one.error_state.details for one in listeners if one.error_state.details]
    return EnvoyState(
        bootstrap=info.command_line_options.config_path,
        versions=versions,
        refused=refused,
        details=tuple(dict.fromkeys(details)),
        has_listeners=not is_closed or bool(versions[_LISTENERS] and not listeners),
        has_clusters=not lacks_clusters,
    )


def why_not_ready(address: str) -> str:
    """Why the Envoy with this admin address takes no requests; empty if it does."""
    host, port, _ = parse_endpoint(address)
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=_BUSY_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        text = answer.read(_MOST_BYTES).decode(errors="replace").strip()
        if answer.status != http.HTTPStatus.OK:
            return f"Envoy says {text or answer.status}"
        state = _state(connection)
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        return f"no Envoy answers at its admin address {address}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return (
        f"Envoy has no {_NAMES[state.missing_subscription]}: {state.refusal_reason}"
        if state.missing_subscription
        else ""
    )


def begin_drain(address: str) -> bool:
    """Have the Envoy with this admin address close its listeners for clients after its drain time; False if none
    answers there.
    """
    return _ask(address, '/drain_listeners?graceful&inboundonly&"', "POST") is not None


def fail_health_check(address: str) -> bool:
    """Have the Envoy with this admin address close each connection after its answer, and tell load balancers that it
    drains; False if none answers there. Its listeners stay open.
    """
    return _ask(address, '/healthcheck/fail?"', "POST") is not None


def reopen_logs(address: str) -> bool:
    """Have the Envoy with this admin address open the files of its logs again; False if none answers there."""
    return _ask(address, '/reopen_logs?"', "POST") is not None


def running_requests(address: str) -> int:
    """How many requests run at the Envoy with this admin address; 0 if no Envoy answers there."""
    page = _ask(address, f"/stats?format=json&filter={quote(_RUNNING)}")
    if page is None:
        return 0
    found = msgspec.json.decode(page, type=_Stats).stats
    # this one runs, too
    return sum(int(one.value) for one in found if not one.name.startswith("http.admin."))


def _ask(address: str, path: str, method: str = "GET") -> bytes | None:
    host, port, _ = parse_endpoint(address)
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=_BUSY_S)
    try:
        return _get(connection, path, method)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _get(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> bytes:
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read(_MOST_BYTES)
    if answer.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(answer.status)
    return body


def _dump(connection: http.client.HTTPConnection, path: str) -> list[_Resource]:
    return msgspec.json.decode(_get(connection, path), type=_Dump).configs


def _versions(stats: list[_Stat]) -> dict[str, str]:
    return {name: str(one.value) for one in stats if (name := _subscription(one, "version_text"))}


def _refused(stats: list[_Stat]) -> dict[str, int]:
    """Rejected by a check, or unreadable: a file with an unknown type is a failure and no rejection."""
    found: dict[str, int] = {}
    for one in stats:
        for kind in ("update_rejected", "update_failure"):
            name = _subscription(one, kind)
            if name and one.value:
                found[name] = found.get(name, 0) + int(one.value)
    return found


def _subscription(stat: _Stat, kind: str) -> str:
    """The name before ``kind``; empty if the statistic is another one."""
    name, _, last = stat.name.rpartition(".")
    return name if last == kind else ""
