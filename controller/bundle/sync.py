# SPDX-License-Identifier: Apache-2.0
"""Write the bundle of a directory, and again on every change: make before break."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.audit import caused_by
from controller.bundle.acknowledgements import file_version, subscription_names
from controller.bundle.atomic_files import FileChanged, ignore_change, remove_file, replace_file
from controller.bundle.envoy.authentication import AUTHENTICATION_FILES, unused_authentication_files
from controller.bundle.envoy.bootstrap import CLUSTERS_FILE, ENDPOINTS_FOLDER
from controller.bundle.envoy.bundle import BundleWriter, endpoint_subscriptions, keep_old_clusters
from controller.bundle.envoy.listeners import ROUTES_FOLDER, routes_files
from controller.bundle.envoy.secrets import SECRETS_FOLDER, secret_sources
from controller.bundle.secret_readers import AuthKeyReader, SecretFileReader, drop_unusable_secrets
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_directory
from extproc.api.make_before_break import DrainingServers
from extproc.api.status_page_contents import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.bundle.acknowledgements import AcknowledgementPoller
    from controller.bundle.envoy.secrets import SecretSource
    from extproc.api.config_errors import Mistake
    from extproc.api.config_loader import ConfigSource
    from extproc.api.config_snapshot import Snapshot

log = logging.getLogger(__name__)

# Envoy reads a file within some milliseconds of its being moved into place; clusters then connect and warm up.
_TAKEN_UP_S: Final = 0.3
# Digests of API keys, and key sets, which may hold signing keys: readable only by the owner, who also runs Envoy.
_SECRET_FILES: Final = frozenset(AUTHENTICATION_FILES)
# mallopt's parameter in glibc
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1024 * 1024
_POLL_S: Final = 0.2
_RETRY_S: Final = 10.0
# A bundle of a thousand models takes Envoy seconds to read. It is waited for so long, or so long without an answer.
_LONGEST_STEP_S: Final = 30.0
_SILENCE_S: Final = 5.0
# extproc uses a removed server until Envoy has the new ones, for which it waits 18 s at most.
_LINGER_S: Final = 30.0
# Where the golden bundles expect to be mounted.
GOLDEN_PATH: Final = "/etc/attache/envoy"


def release_freed_memory() -> None:
    """Have the C library return the memory of large texts to the system as soon as they are freed.

    The files of a bundle may have 15 MB. After the first is freed, glibc takes such blocks from heaps of its own, one
    for each thread, where they leave holes: the writer of 1,000 models grew by 30 MiB now and then. Only glibc does.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    except AttributeError:
        return


class PublishStep(msgspec.Struct, frozen=True):
    """After ``wait_s`` seconds, replace ``files`` in their order, then remove ``gone``."""

    wait_s: float
    files: Mapping[str, str]
    gone: tuple[str, ...] = ()


def publish_steps(before: Snapshot | None, after: Snapshot, writer: BundleWriter) -> list[PublishStep]:
    """How to replace the bundle of ``before`` by that of ``after``: make before break, as xDS requires.

    Source: Envoy's xDS protocol, "Eventual consistency considerations": clusters and endpoints come before the routes
    that name them, and go after them.
    """
    final = writer.build(after)
    if before is None:
        return [PublishStep(0.0, final)]
    both = writer.build(keep_old_clusters(after, before))
    clusters = {name: text for name, text in both.items() if _comes_first(name)}
    others = {name: text for name, text in final.items() if not _comes_first(name)}
    planned = [PublishStep(0.0, clusters), PublishStep(_TAKEN_UP_S, others)]
    unused = unused_authentication_files(after.gateway.authentication) - unused_authentication_files(
        before.gateway.authentication
    )
    routes = routes_files(before).keys() - final.keys()
    # a server with another connection has its endpoints in another file; or, with many servers, in none
    moved = endpoint_subscriptions(before).keys() - both.keys() - final.keys()
    gone = (*(name for name in both if name not in final), *sorted(unused | routes | moved))
    # with the files of endpoints, which servers that have become few have in the end alone
    last = {name: text for name, text in final.items() if _comes_first(name) and both.get(name) != text}
    if gone or last:
        planned.append(PublishStep(_TAKEN_UP_S, last, gone))
    return planned


def _comes_first(name: str) -> bool:
    return name == CLUSTERS_FILE or name.startswith(ENDPOINTS_FOLDER + "/")


def write_step(out: Path, step: PublishStep, changed: FileChanged = ignore_change) -> None:
    """Carry out the files of ``step`` in ``out``. A file that would not change is left alone."""
    for name, text in step.files.items():
        replace_file(out / name, text.encode(), 0o600 if name in _SECRET_FILES else 0o644, changed)
    for name in step.gone:
        remove_file(out / name, changed)


def write_secrets(out: Path, secrets: Mapping[str, str], changed: FileChanged = ignore_change) -> None:
    """Write certificates and keys, each to a file readable by the owner alone, who also runs Envoy. Unchanged files are
    not written.
    """
    for name, text in secrets.items():
        replace_file(out / name, text.encode(), 0o600, changed)


def remove_unused_secrets(out: Path, secrets: Mapping[str, str], changed: FileChanged = ignore_change) -> None:
    """Files of secrets that nothing names any more."""
    known = {out / name for name in secrets}
    for file in (out / SECRETS_FOLDER).glob("[!.]*"):
        if file not in known:
            remove_file(file, changed)


def remove_orphans(out: Path, snapshot: Snapshot, changed: FileChanged = ignore_change) -> None:
    """Files of servers, listeners and keys that are no more, left behind by an earlier writer."""
    for name in unused_authentication_files(snapshot.gateway.authentication):
        remove_file(out / name, changed)
    kept = [
        *endpoint_subscriptions(snapshot),
        *routes_files(snapshot),
    ]
    known = {out / name for name in kept}
    for folder in (ENDPOINTS_FOLDER, ROUTES_FOLDER):
        for file in (out / folder).rglob("*.json"):
            if file not in known:
                remove_file(file, changed)


def write_bundle_once(
    snapshot: Snapshot, out: Path, path: str, folder: Path = Path(), changed: FileChanged = ignore_change
) -> None:
    """Write the bundle of ``snapshot``, which was read from ``folder``, into ``out``; raises ConfigInvalid.

    ``path``: where Envoy will find it.
    """
    now = datetime.now(UTC)
    filled = AuthKeyReader(os.environ, folder).fill_keys(snapshot, now)
    secrets = SecretFileReader(os.environ, folder).read(secret_sources(filled), now)
    with caused_by(reason=f"configuration {snapshot.version}"):
        _write_first(filled, secrets, out, BundleWriter(path), changed)


class BundleSync:
    """Writes the bundle of a directory, and again on every change, and polls whether Envoy takes it.

    A configuration that is broken later is logged, and the last good bundle stays. ``is_valid``: whether the directory
    is usable as it is. ``missing_keys``: problems of API keys that it names and that cannot be used yet.
    ``written_at_s``: when the bundle last changed, wall clock. ``secrets``: certificates and keys, which Envoy watches
    one by one. ``unusable``: secrets without any good content so far; the listeners and servers that need them are not
    served. ``acknowledgements``: None, if Envoy is not polled.
    """

    def __init__(
        self,
        config: ConfigSource,
        out: Path,
        path: str,
        acknowledgements: AcknowledgementPoller | None = None,
        changed: FileChanged = ignore_change,
    ) -> None:
        """``path``: where Envoy will find the bundle. ``changed``: called with each file written or removed."""
        self._changed = changed
        self.is_valid = True
        self.missing_keys: tuple[Mistake, ...] = ()
        self.unusable: Mapping[SecretSource, Mistake] = {}
        self.written_at_s = 0.0
        self.acknowledgements = acknowledgements
        self._config = config
        self._out = out
        self._keys = AuthKeyReader(os.environ, config.path)
        self.secrets = SecretFileReader(os.environ, config.path, bundle=out)
        self._draining, self._writer = DrainingServers(_LINGER_S), BundleWriter(path)
        # what is in the bundle, and what could not be written last: a configuration, and secrets by file
        self._failed: tuple[Snapshot, Mapping[str, str]] | None = None
        # digests of the files that the bundle was made from
        self._in_bundle: Mapping[str, str] = {}
        # why the directory as it is now cannot be used
        self._refused = ""
        self._retry_at_s = 0.0
        self._stop = threading.Event()

    @property
    def report(self) -> ConfigReport:
        """What of the directory is in use: by Envoy, or, if Envoy is not polled, in the bundle."""
        known = ConfigReport(files=self._in_bundle) if self.acknowledgements is None else self.acknowledgements.report
        refused = self._refused or known.refused
        missing = tuple(f"{one.file}: {one.message}" for one in self.missing_keys)
        return msgspec.structs.replace(known, refused=refused, missing_keys=missing)

    def run(self, stop: threading.Event, on_ready: Callable[[], None] = lambda: None) -> None:
        """Until ``stop``; raises ConfigInvalid at the start. ``on_ready``: the first bundle is written."""
        clock = time.monotonic  # noqa: TID251 - the edge
        self._stop = stop
        self.write_first_bundle(clock)
        on_ready()
        if self.acknowledgements is not None:
            threading.Thread(target=_poll_for_ever, args=(self.acknowledgements, clock), daemon=True).start()
        while not stop.wait(_POLL_S):
            self.sync_once(clock)

    def write_first_bundle(self, clock: Callable[[], float]) -> None:
        """Write the first bundle; raises ConfigInvalid."""
        self._snapshot = self._config.read()
        self._written = self._with_secrets(self._fill(self._snapshot))
        with caused_by(reason=f"configuration {self._snapshot.version}"):
            _write_first(*self._written, self._out, self._writer, self._changed)
        self._note_written(clock())

    def sync_once(self, clock: Callable[[], float]) -> None:
        """Write what has changed since."""
        if self._config.has_changed():
            fresh = self._read()
            self.is_valid = fresh is not None
            fresh = fresh or self._snapshot
            self._draining.on_change(self._snapshot, fresh, clock())
            if fresh.gateway.admin != self._snapshot.gateway.admin:
                log.warning("the admin address has changed: restart Envoy for that")
            self._snapshot = fresh
        if not self.is_valid:
            # extproc refuses the directory, too, and may not have read before that servers were removed
            self._draining.restart_drain(clock())
        wanted = queued, secrets = self._with_secrets(self._fill(self._draining.with_draining(self._snapshot, clock())))
        if wanted == self._written or (wanted == self._failed and clock() < self._retry_at_s):
            return
        with caused_by(reason=f"configuration {queued.version}"):
            is_replaced = self._replace(queued, secrets, clock)
        if is_replaced:
            self._written, self._failed = wanted, None
            self._note_written(clock())
        else:
            self._failed, self._retry_at_s = wanted, clock() + _RETRY_S

    def _replace(self, after: Snapshot, secrets: Mapping[str, str], clock: Callable[[], float]) -> bool:
        """Whether the bundle was replaced by that of ``after``. Write errors, such as a full disk, must not end the
        process.

        Secrets come first and go last. Where they alone have changed, nothing else is written.
        """
        before = self._written[0]
        try:
            if self.acknowledgements is not None:
                self.acknowledgements.on_write_started()
            write_secrets(self._out, secrets, self._changed)
            if before != after:
                for step in publish_steps(before, after, self._writer):
                    time.sleep(step.wait_s)
                    write_step(self._out, step, self._changed)
                    self._wait_until_used(step, after, clock)
            remove_unused_secrets(self._out, secrets, self._changed)
        except Exception:
            log.exception("the bundle could not be written, the last one stays; tried again in %g s", _RETRY_S)
            return False
        return True

    def _wait_until_used(self, step: PublishStep, after: Snapshot, clock: Callable[[], float]) -> None:
        """Envoy must have the clusters before the routes that name them, and is not given more than it can read."""
        if self.acknowledgements is None or not self.acknowledgements.has_acknowledged:
            return
        watched = subscription_names(after).keys()
        # read once: a file may have 15 MB
        versions = {
            name: file_version(text)
            for name, text in step.files.items()
            if name in watched and not name.startswith(ENDPOINTS_FOLDER)
        }
        began_s = heard_s = clock()
        while heard_s - began_s < _LONGEST_STEP_S and clock() - heard_s < _SILENCE_S and not self._stop.is_set():
            used = self.acknowledgements.is_used(versions, after)
            if used:
                return
            if used is not None:
                heard_s = clock()
            self._stop.wait(_POLL_S)

    def _with_secrets(self, snapshot: Snapshot) -> tuple[Snapshot, Mapping[str, str]]:
        """What of ``snapshot`` can be served, and its secrets. Raises ConfigInvalid only for what ``_read`` has not
        seen.
        """
        secrets, unusable = self.secrets.read_available(secret_sources(snapshot), datetime.now(UTC))
        served = drop_unusable_secrets(snapshot, unusable)
        if unusable != self.unusable:
            self.unusable = unusable
            if unusable:
                log.error(
                    "the listeners and servers that need these files are not served until they are good:\n%s",
                    ConfigInvalid(list(unusable.values())),
                )
            else:
                log.info("all certificates and keys are good")
        return served, secrets

    def _note_written(self, now: float) -> None:
        log.info("the bundle has configuration %s", self._written[0].version)
        self.written_at_s = datetime.now(UTC).timestamp()
        self._in_bundle = self._written[0].digests
        if self.acknowledgements is not None:
            self.acknowledgements.expect(self._written[0], self._out, now)

    def _read(self) -> Snapshot | None:
        try:
            snapshot = self._config.read()
            # Once read, they are there for good. What is not served already is waited for; what is served must not be
            # replaced by what cannot be.
            self.secrets.check(source for source in secret_sources(snapshot) if source not in self.unusable)
            drop_unusable_secrets(snapshot, self.unusable)
        except ConfigInvalid as error:
            log.error("configuration refused, the last good bundle stays: %s", "; ".join(str(error).splitlines()))
            self._refused = str(error)
            return None
        if self._refused:
            self._refused = ""
            log.info("the configuration can be used again")
        return snapshot

    def _fill(self, snapshot: Snapshot) -> Snapshot:
        """Missing keys do not keep other callers from being served: they are read again each time."""
        filled, mistakes = self._keys.fill_available_keys(snapshot, datetime.now(UTC))
        if tuple(mistakes) != self.missing_keys:
            self.missing_keys = tuple(mistakes)
            if mistakes:
                log.error("whoever uses these keys is refused until they are there:\n%s", ConfigInvalid(mistakes))
            else:
                log.info("all keys are there")
        return filled


def _poll_for_ever(acknowledgements: AcknowledgementPoller, clock: Callable[[], float]) -> None:
    """In a thread of its own: an Envoy that answers late must not hold up the writing."""
    while True:
        try:
            acknowledgements.poll(clock())
        except Exception:
            log.exception("Envoy could not be asked what it uses; please report this")
            time.sleep(_RETRY_S)
        time.sleep(_POLL_S)


def wait_until_acknowledged(
    snapshot: Snapshot, out: Path, acknowledgements: AcknowledgementPoller, wait_s: float
) -> bool:
    """Whether Envoy uses the bundle of ``snapshot``, which is in ``out``, within ``wait_s``; a failure is logged."""
    clock = time.monotonic  # noqa: TID251 - the edge
    began_at_s = clock()
    acknowledgements.expect(snapshot, out, began_at_s)
    while True:
        verdict = acknowledgements.poll(clock())
        is_late = clock() - began_at_s >= wait_s
        if verdict.status == "Taken" or is_late or verdict.status == "Refused":
            break
        time.sleep(_POLL_S)
    if verdict.status not in {"Taken", "Refused"}:
        log.error("%s", verdict.text or f"nothing is known of Envoy within {wait_s:g} s")
    return verdict.status == "Taken"


def _write_first(
    snapshot: Snapshot,
    secrets: Mapping[str, str],
    out: Path,
    writer: BundleWriter,
    changed: FileChanged = ignore_change,
) -> None:
    write_secrets(out, secrets, changed)
    for step in publish_steps(None, snapshot, writer):
        write_step(out, step, changed)
    remove_orphans(out, snapshot, changed)
    remove_unused_secrets(out, secrets, changed)


def write_golden(folder: Path) -> None:
    """Write ``bundles/NAME`` for every directory ``sources/NAME`` of ``folder``."""
    for source in sorted((folder / "sources").iterdir()):
        write_bundle_once(load_directory(source), folder / "bundles" / source.name, GOLDEN_PATH, source)
