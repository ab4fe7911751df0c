# SPDX-License-Identifier: Apache-2.0
"""The bundle command: writes the bundle of a directory and follows its changes."""

from __future__ import annotations

import logging
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from controller.gateway.bundle import BundleWriter
from controller.gateway.publish import Lingering, remove_orphans, steps, write
from controller.key_files import KeyFiles
from extproc.config.directory import load_directory
from extproc.config.errors import ConfigInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.config.directory import ConfigDirectory
    from extproc.config.types import Snapshot

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_RETRY_S: Final = 10.0
# extproc follows a change that names a new server within four seconds, and uses the old one until then.
_LINGER_S: Final = 10.0

# Where the golden bundles expect to be mounted.
GOLDEN_PATH: Final = "/etc/attache/envoy"


def write_once(snapshot: Snapshot, out: Path, path: str) -> None:
    """Write the bundle of ``snapshot`` into ``out``. ``path``: where Envoy will find it. Raises ConfigInvalid."""
    _write_first(KeyFiles(os.environ).fill(snapshot, datetime.now(UTC)), out, BundleWriter(path))


def follow(config: ConfigDirectory, out: Path, path: str) -> None:
    """Write the bundle of ``config``, and until interrupted again on every change; raises ConfigInvalid at the start.

    Later a broken configuration is logged, and the last good bundle stays.
    """
    clock = time.monotonic  # noqa: TID251 - the edge
    lingering, writer = Lingering(_LINGER_S), BundleWriter(path)
    keys, snapshot = KeyFiles(os.environ), config.read()
    written = keys.fill(snapshot, datetime.now(UTC))
    failed, retry_at_s = None, 0.0
    _write_first(written, out, writer)
    while True:
        if config.has_changed():
            fresh = _read(config, keys) or snapshot
            lingering.follow(snapshot, fresh, clock())
            if fresh.gateway.admin != snapshot.gateway.admin:
                log.warning("the admin address has changed: restart Envoy for that")
            snapshot = fresh
        queued = keys.fill(lingering.added_to(snapshot, clock()), datetime.now(UTC))
        if queued != written and (queued != failed or clock() >= retry_at_s):
            if _replace(written, queued, out, writer):
                written, failed = queued, None
            else:
                failed, retry_at_s = queued, clock() + _RETRY_S
        time.sleep(_POLL_S)


def _write_first(snapshot: Snapshot, out: Path, writer: BundleWriter) -> None:
    for step in steps(None, snapshot, writer):
        write(out, step)
    remove_orphans(out, snapshot)


def _replace(before: Snapshot, after: Snapshot, out: Path, writer: BundleWriter) -> bool:
    """Whether the bundle of ``before`` was replaced by that of ``after``. A full disk, say, must not end the process."""
    try:
        for step in steps(before, after, writer):
            time.sleep(step.wait_s)
            write(out, step)
    except Exception:
        log.exception("the bundle could not be written, the last one stays; tried again in %g s", _RETRY_S)
        return False
    return True


def _read(config: ConfigDirectory, keys: KeyFiles) -> Snapshot | None:
    try:
        snapshot = config.read()
        # once read, they are there for good
        keys.fill(snapshot, datetime.now(UTC))
    except ConfigInvalid as error:
        log.error("configuration refused, the last good bundle stays:\n%s", error)
        return None
    return snapshot


def write_golden(folder: Path) -> None:
    """Write ``bundles/NAME`` for every directory ``sources/NAME`` of ``folder``."""
    for source in sorted((folder / "sources").iterdir()):
        write_once(load_directory(source), folder / "bundles" / source.name, GOLDEN_PATH)
