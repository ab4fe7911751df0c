# SPDX-License-Identifier: Apache-2.0
"""Whether Envoy uses the bundle as it was last written (ACK) or has refused it (NACK), by its admin interface."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import msgspec

from controller.bundle.envoy.bootstrap import CLUSTERS_FILE, ENDPOINTS_FOLDER, LISTENERS_FILE
from controller.bundle.envoy.bundle import endpoint_subscriptions
from controller.bundle.envoy.listeners import listener_groups, routes_files
from extproc.api.addresses import parse_endpoint
from extproc.api.status_pages import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.api.snapshot import Snapshot

# While Envoy reads a bundle of thousands of routes it answers nobody for seconds.
_BUSY_S: Final = 5.0
# What is asked for is filtered: some lines a listener or cluster.
_MOST_BYTES: Final = 64 * 2**20
_STATS: Final = r"\.(version_text|update_rejected|update_failure)$"
_ROUTES: Final = "http.attache.rds."
_ROUTE_STATS: Final = r"^http\.attache\.rds\..*\.version_text$"
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


def _get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
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


log = logging.getLogger(__name__)
# Envoy reads a file within milliseconds, and warms new clusters for a second or two.
PATIENCE_S: Final = 10.0
# Envoy may be started later than the bundle is written.
_START_S: Final = 30.0
_SOON_S: Final = 0.5
_LATER_S: Final = 10.0
# Each server's endpoints are in a file of their own; all objects are in the others.
_ENDPOINTS: Final = f"{ENDPOINTS_FOLDER}/"
Status = Literal["Taken", "Refused", "Behind", "OtherBundle", "NoEnvoy"]


class Verdict(msgspec.Struct, frozen=True):
    """``files``: those that Envoy refused or does not use yet. ``text``: for people. ``has_nothing``: it uses no routes
    at all.
    """

    status: Status
    text: str = ""
    files: tuple[str, ...] = ()
    has_nothing: bool = False


class _Versioned(msgspec.Struct):
    version_info: str = ""


_version: Final = msgspec.json.Decoder(_Versioned)


def version_of(text: str | bytes) -> str:
    """The version of a file of the bundle."""
    return _version.decode(text).version_info


def versions_of(out: Path, snapshot: Snapshot) -> dict[str, str]:
    """The version of each file of the bundle in ``out``."""
    names = [
        CLUSTERS_FILE,
        *endpoint_subscriptions(snapshot),
        *routes_files(snapshot.gateway),
        LISTENERS_FILE,
    ]
    return {name: version_of((out / name).read_bytes()) for name in names}


def subscriptions_of(snapshot: Snapshot) -> dict[str, str]:
    """By file, how Envoy's statistics call who reads it."""
    groups = listener_groups(snapshot.gateway)
    return {
        CLUSTERS_FILE: "cluster_manager.cds",
        **{file: f"cluster.{cluster}" for file, cluster in endpoint_subscriptions(snapshot).items()},
        **{one.routes_file: f"http.attache.rds.{_in_statistics(one.route_config_name)}" for one in groups},
        LISTENERS_FILE: "listener_manager.lds",
    }


def _in_statistics(name: str) -> str:
    """How Envoy spells a name in its statistics."""
    return name.replace(":", "_")


class Expected(msgspec.Struct, frozen=True):
    """``bootstrap``: where Envoy finds it. ``versions`` and ``subscriptions``: by file. ``refusals``: counted before.
    ``digests``: of the files of the directory that the bundle was made from.
    """

    bootstrap: str = ""
    versions: Mapping[str, str] = {}
    subscriptions: Mapping[str, str] = {}
    refusals: Mapping[str, int] = {}
    digests: Mapping[str, str] = {}

    def is_refused(self, name: str, state: EnvoyState) -> bool:
        """Whether Envoy has refused something of this file since; its counts begin anew with Envoy."""
        subscription = self.subscriptions[name]
        return state.refused.get(subscription, 0) not in {0, self.refusals.get(subscription, 0)}


def verdict_of(state: EnvoyState | None, expected: Expected, *, address: str) -> Verdict:
    """``address``: Envoy's admin address."""
    if state is None:
        return Verdict(
            "NoEnvoy",
            f"no Envoy answers at its admin address {address}, so nobody is known to use this bundle; start Envoy with "
            "its bootstrap.json, or say where its admin interface is with --admin (off: do not look)",
        )
    used = state.versions
    behind = [name for name, version in expected.versions.items() if used.get(expected.subscriptions[name]) != version]
    refused = tuple(name for name in behind if expected.is_refused(name, state))
    if refused:
        why = "; ".join(state.details) or "its log says why, after 'config update rejected'"
        kept = "serves nothing" if state.has_nothing else "keeps what it had"
        return Verdict(
            "Refused",
            f"Envoy refused {', '.join(refused)} and {kept}: {why}. Please report this unless it is an"
            " address in use: what `attache check` accepts, Envoy should take",
            refused,
            state.has_nothing,
        )
    # a path may be written in several ways, so alone it says nothing
    if {CLUSTERS_FILE, LISTENERS_FILE} <= set(behind) and state.bootstrap != expected.bootstrap:
        return Verdict(
            "OtherBundle",
            f"the Envoy at {address} was started with {state.bootstrap or 'another configuration'} and reads nothing of"
            f" this bundle; start it with {expected.bootstrap}, or correct 'admin' in the GatewayConfig",
        )
    if behind:
        text = f"Envoy does not use the newest {', '.join(behind)} yet; its log may say why"
        return Verdict("Behind", text, tuple(behind), state.has_nothing)
    return Verdict("Taken")


def report_of(verdict: Verdict, expected: Expected, before: ConfigReport) -> ConfigReport:
    """The report on the directory's files. Endpoints that are on their way make no file a new one."""
    lacks_endpoints_alone = verdict.status == "Behind" and all(one.startswith(_ENDPOINTS) for one in verdict.files)
    if verdict.status == "Taken" or lacks_endpoints_alone:
        return ConfigReport(files=expected.digests)
    files = {} if verdict.has_nothing else before.files
    kept = ConfigReport(files=files, has_nothing=verdict.has_nothing)
    if verdict.status == "Refused":
        return msgspec.structs.replace(kept, refused=verdict.text)
    return msgspec.structs.replace(kept, waiting=verdict.text)


class Acknowledgements:
    """Polls Envoy after each write and, less often, later. Logs a problem once, and its end.

    ``report``: what of the directory Envoy uses.
    """

    def __init__(self, read: Callable[[str], EnvoyState | None], bootstrap: str, *, address: str | None = None) -> None:
        """``address``: of Envoy's admin interface, if it is not the one that is configured."""
        self.verdict = Verdict("NoEnvoy")
        self.report = ConfigReport(waiting=f"Envoy has not been asked yet whether it uses {bootstrap}")
        self._read = read
        self._given = address
        # the configured one comes first; until Envoy is restarted, it has the one before
        self._addresses: tuple[str, ...] = ()
        self._expected = Expected(bootstrap)
        self._refusals: Mapping[str, int] = {}
        self._written_at_s = self._poll_at_s = 0.0
        self._has_acknowledged = False
        self._logged = ""
        # one thread writes, another polls
        self._lock = threading.Lock()

    @property
    def has_acknowledged(self) -> bool:
        """Whether Envoy has ever taken or refused a bundle."""
        return self._has_acknowledged

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where Envoy's admin interface may be; empty until a bundle is written."""
        return self._addresses

    def expect(self, snapshot: Snapshot, out: Path, now: float) -> None:
        """From now on, poll for the bundle of ``snapshot``, which has been written to ``out``."""
        address = self._given or snapshot.gateway.admin
        versions, subscriptions = versions_of(out, snapshot), subscriptions_of(snapshot)
        with self._lock:
            self._addresses = (address, *(one for one in self._addresses[:1] if one != address))
            self._expected = Expected(
                self._expected.bootstrap, versions, subscriptions, self._refusals, snapshot.digests
            )
            # a poll that is due stays due: where something changes all the time, it would be put off for ever
            is_waiting = self._written_at_s < self._poll_at_s < now + _SOON_S
            self._poll_at_s = self._poll_at_s if is_waiting else now + _SOON_S
            self._written_at_s = now

    def is_used(self, versions: Mapping[str, str], snapshot: Snapshot) -> bool | None:
        """Whether Envoy uses these versions of the files of a bundle of ``snapshot``, or has refused one.

        None if it does not answer, or never has acknowledged any.
        """
        with self._lock:
            addresses = self._addresses if self._has_acknowledged else ()
        state = next((one for address in addresses if (one := self._read(address)) is not None), None)
        if state is None:
            return None
        subscriptions = subscriptions_of(snapshot)
        wanted = {subscriptions[name]: version for name, version in versions.items() if name in subscriptions}
        is_refused = any(state.refused.get(name, 0) > self._refusals.get(name, 0) for name in wanted)
        # what Envoy does not subscribe to, for want of its listener, is not waited for
        return is_refused or all(state.versions.get(name, version) == version for name, version in wanted.items())

    def poll(self, now: float) -> Verdict:
        """Ask Envoy, if it is time to, and log what has changed."""
        with self._lock:
            expected, addresses = self._expected, self._addresses
            if now < self._poll_at_s or not addresses:
                return self.verdict
        # not under the lock: this may take seconds, and writing must not wait for it
        states = (self._read(address) for address in addresses)
        state = next((one for one in states if one is not None), None)
        with self._lock:
            if expected is not self._expected:
                return self.verdict
            self.verdict = verdict_of(state, expected, address=addresses[0])
            self.report = report_of(self.verdict, expected, self.report)
            if state is not None:
                self._refusals = state.refused
            is_final = self._is_final(now)
            self._poll_at_s = now + (_LATER_S if is_final else _SOON_S)
            if is_final:
                self._log_change()
            return self.verdict

    def _is_final(self, now: float) -> bool:
        """Refusals are final; all else may come in time, and Envoy may be started later than this."""
        if self.verdict.status in {"Taken", "Refused"}:
            self._has_acknowledged = True
            return True
        return now - self._written_at_s >= (PATIENCE_S if self._has_acknowledged else _START_S)

    def _log_change(self) -> None:
        if self.verdict.status == "Taken":
            if self._logged:
                log.info("Envoy uses the bundle as it is")
            self._logged = ""
        elif self.verdict.text != self._logged:
            level = logging.ERROR if self.verdict.status == "Refused" else logging.WARNING
            log.log(level, "%s", self.verdict.text)
            self._logged = self.verdict.text
