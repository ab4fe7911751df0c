"""The bundle command: reads the configuration directory, writes the bundle, and follows changes if asked to."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from controller.gateway.publish import Lingering, remove_orphans, steps, write
from extproc.config.directory import load_directory
from extproc.config.errors import ConfigInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.config.directory import ConfigDirectory
    from extproc.config.types import Snapshot

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
# extproc takes up to four seconds to follow a change that names a new server, and sends requests to the old one until then.
_LINGER_S: Final = 10.0

# Where the golden bundles expect to be mounted.
GOLDEN_PATH: Final = "/etc/attache/envoy"


def write_once(snapshot: Snapshot, out: Path, path: str) -> None:
    """Write the bundle of ``snapshot`` into ``out``. ``path``: where Envoy will find it."""
    for step in steps(None, snapshot, path):
        write(out, step)
    remove_orphans(out, snapshot)


def follow(config: ConfigDirectory, out: Path, path: str, snapshot: Snapshot) -> None:
    """Until interrupted, write again on every change. ``snapshot``: whose bundle is written already.

    A broken configuration is logged, and the last good bundle stays.
    """
    clock = time.monotonic  # noqa: TID251 - the edge
    lingering = Lingering(_LINGER_S)
    written = snapshot
    while True:
        if config.has_changed():
            fresh = _read(config) or snapshot
            lingering.follow(snapshot, fresh, clock())
            if fresh.gateway.admin != snapshot.gateway.admin:
                log.warning("the admin address has changed: restart Envoy for that")
            snapshot = fresh
        queued = lingering.added_to(snapshot, clock())
        if queued != written:
            for step in steps(written, queued, path):
                time.sleep(step.wait_s)
                write(out, step)
            written = queued
        time.sleep(_POLL_S)


def _read(config: ConfigDirectory) -> Snapshot | None:
    try:
        return config.read()
    except (ConfigInvalid, OSError) as error:
        log.error("configuration refused, the last good bundle stays:\n%s", error)
        return None


def write_golden(folder: Path) -> None:
    """Write ``bundles/NAME`` for every directory ``sources/NAME`` of ``folder``."""
    for source in sorted((folder / "sources").iterdir()):
        write_once(load_directory(source), folder / "bundles" / source.name, GOLDEN_PATH)
