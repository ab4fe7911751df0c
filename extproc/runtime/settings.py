# SPDX-License-Identifier: Apache-2.0
"""What one process is told by its command line."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from extproc.api.load import Directory
from extproc.streams.context import GatewayOptions
from extproc.streams.tls import TlsFiles


class Worker(msgspec.Struct, frozen=True):
    """One of several processes on this machine; ``directory`` holds the sockets between them."""

    number: int
    workers: int
    directory: Path


class Tls(msgspec.Struct, frozen=True):
    """The gRPC port has TLS. ``files``: of the certificate; None: one of our own that nobody vouches for."""

    files: TlsFiles | None = None


class Settings(msgspec.Struct, frozen=True):
    """``listen``: ``ip:port`` or ``unix:path``. ``metrics``: host and port of /metrics and /readyz, or None."""

    config: Directory
    listen: str
    metrics: tuple[str, int] | None
    drain_s: float
    settle_s: float
    gateway: GatewayOptions = GatewayOptions()
    # where a share of decisions is written down, if anywhere
    decision_log: Path | None = None
    decision_share: float = 0.01
    # serve /debug/explain; it shows which prompts are cached, so what others have asked: for operators only
    shows_reasons: bool = False
    worker: Worker | None = None
    # where all processes of this machine listen; empty if who calls them is not ours to configure
    listens: tuple[str, ...] = ()
    redis: str | None = None
    redis_channel: str = "attache"
    # where the levels of local limits outlive the process, if anywhere
    state: Path | None = None
    # where gRPC's health service listens beside the port of the streams, if anywhere
    health: str | None = None
    tls: Tls | None = None
    # how many file descriptors the process may have
    descriptors: float = math.inf
