"""The bundle command: reads the configuration directory, writes the bundle, and follows changes if asked to."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from controller.gateway.publish import Lingering, remove_orphans, steps, write
from extproc.config.errors import ConfigInvalid
from extproc.config.load import load_directory, signature

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.config.types import Snapshot

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
# extproc takes up to four seconds to follow a change that names a new server, and sends requests to the old one until then.
_LINGER_S: Final = 10.0

# Where the golden bundles expect to be mounted.
GOLDEN_PATH: Final = "/etc/attache/envoy"


def write_once(config: Path, out: Path, path: str) -> Snapshot:
    """Write the bundle of ``config`` into ``out``; raises ConfigInvalid."""
    snapshot = load_directory(config)
    for step in steps(None, snapshot, path):
        write(out, step)
    remove_orphans(out, snapshot)
    return snapshot


def follow(config: Path, out: Path, path: str, snapshot: Snapshot) -> None:
    """Until interrupted, write again on every change. A broken configuration is said, and the last good bundle stays."""
    clock = time.monotonic  # noqa: TID251 - the edge
    lingering = Lingering(_LINGER_S)
    seen: object = None
    written = snapshot
    while True:
        now_seen = signature(config)
        if now_seen != seen:
            fresh = _read(config) or snapshot
            lingering.follow(snapshot, fresh, clock())
            if fresh.gateway.admin != snapshot.gateway.admin:
                log.warning("the admin address has changed: restart Envoy for that")
            snapshot = fresh
            # what has changed since may not have been read
            seen = now_seen if signature(config) == now_seen else None
        queued = lingering.added_to(snapshot, clock())
        if queued != written:
            for step in steps(written, queued, path):
                time.sleep(step.wait_s)
                write(out, step)
            written = queued
        time.sleep(_POLL_S)


def _read(config: Path) -> Snapshot | None:
    try:
        return load_directory(config)
    except (ConfigInvalid, OSError) as error:
        log.error("configuration refused, the last good bundle stays:\n%s", error)
        return None


def write_golden(folder: Path) -> None:
    """Write ``bundles/NAME`` for every directory ``sources/NAME`` of ``folder``."""
    for source in sorted((folder / "sources").iterdir()):
        write_once(source, folder / "bundles" / source.name, GOLDEN_PATH)
