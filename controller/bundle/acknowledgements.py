# SPDX-License-Identifier: Apache-2.0
"""Whether Envoy uses the bundle as it was last written (ACK) or has refused it (NACK), by its admin interface."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.bundle.envoy.bootstrap import CLUSTERS_FILE, ENDPOINTS_FOLDER, LISTENERS_FILE
from controller.bundle.envoy.bundle import endpoint_subscriptions
from controller.bundle.envoy.listeners import routes_files
from extproc.api.status_page_contents import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from controller.bundle.envoy_admin_client import EnvoyState
    from extproc.api.config_snapshot import Snapshot

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


class BundleVerdict(msgspec.Struct, frozen=True):
    """``files``: those that Envoy refused or does not use yet. ``text``: for people. ``has_nothing``: it serves no
    request.
    """

    status: Status
    text: str = ""
    files: tuple[str, ...] = ()
    has_nothing: bool = False


class _Versioned(msgspec.Struct):
    version_info: str = ""


_version: Final = msgspec.json.Decoder(_Versioned)


def file_version(text: str | bytes) -> str:
    """The version of a file of the bundle."""
    return _version.decode(text).version_info


def bundle_versions(out: Path, snapshot: Snapshot) -> dict[str, str]:
    """The version of each file of the bundle in ``out``."""
    names = [
        CLUSTERS_FILE,
        *endpoint_subscriptions(snapshot),
        *routes_files(snapshot),
        LISTENERS_FILE,
    ]
    return {name: file_version((out / name).read_bytes()) for name in names}


def subscription_names(snapshot: Snapshot) -> dict[str, str]:
    """By file, the names of its subscriptions in Envoy's statistics."""
    return {
        CLUSTERS_FILE: "cluster_manager.cds",
        **{file: f"cluster.{cluster}" for file, cluster in endpoint_subscriptions(snapshot).items()},
        **routes_files(snapshot),
        LISTENERS_FILE: "listener_manager.lds",
    }


class ExpectedVersions(msgspec.Struct, frozen=True):
    """``bootstrap``: where Envoy finds it. ``versions`` and ``subscriptions``: by file. ``refusals``: counted before.
    ``digests``: of the files of the directory that the bundle was made from.
    """

    bootstrap: str = ""
    versions: Mapping[str, str] = {}
    subscriptions: Mapping[str, str] = {}
    refusals: Mapping[str, int] = {}
    digests: Mapping[str, str] = {}

    def is_refused(self, name: str, state: EnvoyState) -> bool:
        """Whether Envoy has refused an update of this file since; its counters restart with Envoy."""
        subscription = self.subscriptions[name]
        return state.refused.get(subscription, 0) not in {0, self.refusals.get(subscription, 0)}


def bundle_verdict(state: EnvoyState | None, expected: ExpectedVersions, *, address: str) -> BundleVerdict:
    """``address``: Envoy's admin address."""
    if state is None:
        return BundleVerdict(
            "NoEnvoy",
            f"no Envoy answers at its admin address {address}, so nobody is known to use this bundle; start Envoy with "
            "its bootstrap.json, or say where its admin interface is with --admin (off: do not look)",
        )
    used = state.versions
    behind = [name for name, version in expected.versions.items() if used.get(expected.subscriptions[name]) != version]
    refused = tuple(name for name in behind if expected.is_refused(name, state))
    if refused:
        kept = "serves nothing" if state.serves_nothing else "keeps what it had"
        return BundleVerdict(
            "Refused",
            f"Envoy refused {', '.join(refused)} and {kept}: {state.refusal_reason}. Please report this unless it is an"
            " address in use: what `attache check` accepts, Envoy should take",
            refused,
            state.serves_nothing,
        )
    # a path may be written in several ways, so a different path alone is no error
    if {CLUSTERS_FILE, LISTENERS_FILE} <= set(behind) and state.bootstrap != expected.bootstrap:
        return BundleVerdict(
            "OtherBundle",
            f"the Envoy at {address} was started with {state.bootstrap or 'another configuration'} and reads nothing of"
            f" this bundle; start it with {expected.bootstrap}, or correct 'admin' in the GatewayConfig",
        )
    if behind:
        text = f"Envoy does not use the newest {', '.join(behind)} yet; its log may say why"
        return BundleVerdict("Behind", text, tuple(behind), state.serves_nothing)
    return BundleVerdict("Taken")


def config_report(verdict: BundleVerdict, expected: ExpectedVersions, before: ConfigReport) -> ConfigReport:
    """The report on the directory's files. Endpoints that are on their way make no file a new one."""
    lacks_endpoints_alone = verdict.status == "Behind" and all(one.startswith(_ENDPOINTS) for one in verdict.files)
    if verdict.status == "Taken" or lacks_endpoints_alone:
        return ConfigReport(files=expected.digests)
    files = {} if verdict.has_nothing else before.files
    kept = ConfigReport(files=files, has_nothing=verdict.has_nothing)
    if verdict.status == "Refused":
        return msgspec.structs.replace(kept, refused=verdict.text)
    return msgspec.structs.replace(kept, waiting=verdict.text)


class AcknowledgementPoller:
    """Polls Envoy after each write and, less often, later. Logs a problem once, and its end.

    ``report``: what of the directory Envoy uses.
    """

    def __init__(self, read: Callable[[str], EnvoyState | None], bootstrap: str, *, address: str | None = None) -> None:
        """``address``: of Envoy's admin interface, if it is not the one that is configured."""
        self.verdict = BundleVerdict("NoEnvoy")
        self.report = ConfigReport(waiting=f"Envoy has not been asked yet whether it uses {bootstrap}")
        self._read = read
        self._given = address
        # the configured one comes first; until Envoy is restarted, it has the one before
        self._addresses: tuple[str, ...] = ()
        self._expected = ExpectedVersions(bootstrap)
        # as counted before the last write
        self._refusals: Mapping[str, int] = {}
        self._is_writing = False
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
    def admin_addresses(self) -> tuple[str, ...]:
        """Where Envoy's admin interface may be; empty until a bundle is written."""
        return self._addresses

    def on_write_started(self) -> None:
        """Files are about to be written: what Envoy refuses from now on is one of them."""
        with self._lock:
            addresses = self._addresses if self._has_acknowledged else ()
        state = self._state(addresses)
        with self._lock:
            self._is_writing = True
            self._refusals = self._refusals if state is None else state.refused

    def expect(self, snapshot: Snapshot, out: Path, now: float) -> None:
        """From now on, poll for the bundle of ``snapshot``, which has been written to ``out``."""
        address = self._given or snapshot.gateway.admin
        versions, subscriptions = bundle_versions(out, snapshot), subscription_names(snapshot)
        with self._lock:
            self._is_writing = False
            self._addresses = (address, *(one for one in self._addresses[:1] if one != address))
            before = self._expected
            # a file that stays as it is may have been refused: what was counted before it was written still counts
            same = {subscriptions[name] for name, one in versions.items() if before.versions.get(name) == one}
            refusals = {
                name: (before.refusals if name in same else self._refusals).get(name, 0)
                for name in subscriptions.values()
            }
            self._expected = ExpectedVersions(before.bootstrap, versions, subscriptions, refusals, snapshot.digests)
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
        state = self._state(addresses)
        if state is None:
            return None
        subscriptions = subscription_names(snapshot)
        wanted = {subscriptions[name]: version for name, version in versions.items() if name in subscriptions}
        is_refused = any(state.refused.get(name, 0) > self._refusals.get(name, 0) for name in wanted)
        # subscriptions that Envoy lacks, because their listener is missing, are not waited for
        return is_refused or all(state.versions.get(name, version) == version for name, version in wanted.items())

    def poll(self, now: float) -> BundleVerdict:
        """Query Envoy, if the interval is over, and log changes."""
        with self._lock:
            expected, addresses = self._expected, self._addresses
            if now < self._poll_at_s or not addresses:
                return self.verdict
        # not under the lock: this may take seconds, and writing must not wait for it
        state = self._state(addresses)
        with self._lock:
            if expected is not self._expected:
                return self.verdict
            self.verdict = bundle_verdict(state, expected, address=addresses[0])
            self.report = config_report(self.verdict, expected, self.report)
            if state is not None and not self._is_writing:
                self._refusals = state.refused
            is_final = self._is_final(now)
            self._poll_at_s = now + (_LATER_S if is_final else _SOON_S)
            if is_final:
                self._log_change()
            return self.verdict

    def _state(self, addresses: tuple[str, ...]) -> EnvoyState | None:
        return next((one for address in addresses if (one := self._read(address)) is not None), None)

    def _is_final(self, now: float) -> bool:
        """Refusals are final; all other states may change in time, and Envoy may be started later than this process."""
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
