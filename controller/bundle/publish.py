# SPDX-License-Identifier: Apache-2.0
"""From one bundle to the next while Envoy runs: make before break."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.bundle.envoy.authentication import AUTHENTICATION_FILES, unused_files
from controller.bundle.envoy.bootstrap import CLUSTERS_FILE, ENDPOINTS_FOLDER
from controller.bundle.envoy.bundle import endpoint_subscriptions, with_clusters_of
from controller.bundle.envoy.listeners import ROUTES_FOLDER, routes_files
from controller.bundle.envoy.secrets import SECRETS_FOLDER
from controller.bundle.files import replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from controller.bundle.envoy.bundle import BundleWriter
    from extproc.api.snapshot import Snapshot

# Envoy reads a file within some milliseconds of its being moved into place; clusters then connect and warm up.
_TAKEN_UP_S: Final = 0.3
# Digests of API keys, and key sets, which may sign: for the owner alone, as whom Envoy runs, too.
_SECRET_FILES: Final = frozenset(AUTHENTICATION_FILES)
# mallopt's parameter in glibc
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1024 * 1024


def return_large_texts() -> None:
    """Have the C library return the memory of large texts to the system as soon as they are freed.

    The files of a bundle may have 15 MB. After the first is freed, glibc takes such blocks from heaps of its own, one
    for each thread, where they leave holes: the writer of 1,000 models grew by 30 MiB now and then. Only glibc does.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    except AttributeError:
        return


class Step(msgspec.Struct, frozen=True):
    """After ``wait_s`` seconds, replace ``files`` in their order, then remove ``gone``."""

    wait_s: float
    files: Mapping[str, str]
    gone: tuple[str, ...] = ()


def steps(before: Snapshot | None, after: Snapshot, writer: BundleWriter) -> list[Step]:
    """How to replace the bundle of ``before`` by that of ``after``: make before break, as xDS asks for.

    Source: Envoy's xDS protocol, "Eventual consistency considerations": clusters and endpoints come before the routes
    that name them, and go after them.
    """
    final = writer.build(after)
    if before is None:
        return [Step(0.0, final)]
    both = writer.build(with_clusters_of(after, before))
    clusters = {name: text for name, text in both.items() if _comes_first(name)}
    others = {name: text for name, text in final.items() if not _comes_first(name)}
    planned = [Step(0.0, clusters), Step(_TAKEN_UP_S, others)]
    unused = unused_files(after.gateway.authentication) - unused_files(before.gateway.authentication)
    routes = set(routes_files(before.gateway)) - final.keys()
    # a server with another connection has its endpoints in another file; or, with many servers, in none
    moved = endpoint_subscriptions(before).keys() - both.keys() - final.keys()
    gone = (*(name for name in both if name not in final), *sorted(unused | routes | moved))
    # with the files of endpoints, which servers that have become few have in the end alone
    last = {name: text for name, text in final.items() if _comes_first(name) and both.get(name) != text}
    if gone or last:
        planned.append(Step(_TAKEN_UP_S, last, gone))
    return planned


def _comes_first(name: str) -> bool:
    return name == CLUSTERS_FILE or name.startswith(ENDPOINTS_FOLDER + "/")


def write(out: Path, step: Step) -> None:
    """Carry out the files of ``step`` in ``out``. A file that would not change is left alone."""
    for name, text in step.files.items():
        replace_file(out / name, text.encode(), 0o600 if name in _SECRET_FILES else 0o644)
    for name in step.gone:
        (out / name).unlink(missing_ok=True)


def write_secrets(out: Path, secrets: Mapping[str, str]) -> None:
    """Certificates and keys, by file: for the owner alone, as whom Envoy runs, too. What would not change is left
    alone.
    """
    for name, text in secrets.items():
        replace_file(out / name, text.encode(), 0o600)


def remove_unused_secrets(out: Path, secrets: Mapping[str, str]) -> None:
    """Files of secrets that nothing names any more."""
    known = {out / name for name in secrets}
    for file in (out / SECRETS_FOLDER).glob("*.json"):
        if file not in known:
            file.unlink()


def remove_orphans(out: Path, snapshot: Snapshot) -> None:
    """Files of servers, listeners and keys that are no more, left behind by an earlier writer."""
    for name in unused_files(snapshot.gateway.authentication):
        (out / name).unlink(missing_ok=True)
    kept = [
        *endpoint_subscriptions(snapshot),
        *routes_files(snapshot.gateway),
    ]
    known = {out / name for name in kept}
    for folder in (ENDPOINTS_FOLDER, ROUTES_FOLDER):
        for file in (out / folder).rglob("*.json"):
            if file not in known:
                file.unlink()
