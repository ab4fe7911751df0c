# SPDX-License-Identifier: Apache-2.0
"""Envoy's admin interface: what it uses, whether it takes requests, and that it drains."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from extproc.api.addresses import parse_endpoint

# Timeout of the admin interface: while Envoy reads a bundle of thousands of routes, it does not answer for seconds.
_BUSY_S: Final = 5.0
# Largest page that is read. Queries are filtered: some lines for each listener or cluster.
_MOST_BYTES: Final = 64 * 2**20
_STATS: Final = r"\.(version_text|update_rejected|update_failure)$"
_ROUTES: Final = "http.attache.rds."
_ROUTE_STATS: Final = r"^http\.attache\.rds\..*\.version_text$"
_RUNNING: Final = r"^http\..*\.downstream_rq_active$"
_LISTENER_ERRORS: Final = "/config_dump?resource=dynamic_listeners&mask=name,error_state.details"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where another process listens


class EnvoyState(msgspec.Struct, frozen=True):
    """The state of one Envoy, by its admin interface.

    ``bootstrap``: the file that it was started with. ``versions``: in use, by subscription. ``refused``: how often
    something new was refused, by subscription. ``details``: why, as far as it reports that.
    """

    bootstrap: str
    versions: Mapping[str, str]
    refused: Mapping[str, int]
    details: tuple[str, ...] = ()

    @property
    def has_no_routes(self) -> bool:
        """Whether it listens and has no routes yet, or none that it took."""
        routes = [version for name, version in self.versions.items() if name.startswith(_ROUTES)]
        return bool(routes) and not any(routes)

    @property
    def has_nothing(self) -> bool:
        """Whether it has refused the only routes that there are: it was started with them."""
        return self.has_no_routes and any(name.startswith(_ROUTES) for name in self.refused)


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


class _Listener(msgspec.Struct, frozen=True):
    error_state: _ErrorState = _ErrorState()


class _Dump(msgspec.Struct, frozen=True):
    configs: list[_Listener] = []


def read_state(address: str) -> EnvoyState | None:
    """The state of the Envoy with this admin address; None if nothing that answers there is an Envoy."""
    host, port, _ = parse_endpoint(address)
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=_BUSY_S)
    try:
        info = msgspec.json.decode(_get(connection, "/server_info"), type=_ServerInfo)
        page = _get(connection, f"/stats?format=json&filter={quote(_STATS)}")
        stats = msgspec.json.decode(page, type=_Stats).stats
        refused = _refused(stats)
        details = []
        if refused:
            dump = msgspec.json.decode(_get(connection, _LISTENER_ERRORS), type=_Dump)
            details = [one.error_state.details for one in dump.configs if one.error_state.details]
    except (OSError, http.client.HTTPException, ValueError, RecursionError):  # the decoder's error is a ValueError
        return None
    finally:
        connection.close()
    return EnvoyState(
        bootstrap=info.command_line_options.config_path,
        versions=_versions(stats),
        refused=refused,
        details=tuple(dict.fromkeys(details)),
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
        page = _get(connection, f"/stats?format=json&filter={quote(_ROUTE_STATS)}")
        state = EnvoyState("", _versions(msgspec.json.decode(page, type=_Stats).stats), {})
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        return f"no Envoy answers at its admin address {address}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return "Envoy has no routes; its log says why, after 'config update rejected'" if state.has_no_routes else ""


def begin_drain(address: str) -> bool:
    """Have the Envoy with this admin address close its listeners after its drain time; False if none answers there."""
    return _ask(address, "/drain_listeners?graceful", "POST") is not None


def reopen_logs(address: str) -> bool:
    """Have the Envoy with this admin address open the files of its logs again; False if none answers there."""
    return _ask(address, "/reopen_logs", "POST") is not None


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
