# SPDX-License-Identifier: Apache-2.0
"""What a supervisor tells a process that it has started."""

from __future__ import annotations

import msgspec


class WorkerSettings(msgspec.Struct, frozen=True):
    """The process is number ``number`` of ``workers``, from 0; ``directory`` holds the sockets between them.
    ``listen``, ``metrics``, ``health``: descriptors of listening sockets, for the addresses of these options.
    ``others``: those of the other workers.
    """

    number: int
    workers: int
    directory: str
    listen: int | None = None
    metrics: int | None = None
    health: int | None = None
    others: tuple[int, ...] = ()
