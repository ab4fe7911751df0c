# SPDX-License-Identifier: Apache-2.0
"""Where the command line meets the shell: from options to settings, and from there to running processes.

Loading this module loads gRPC and Envoy's schema; the other modules of the command line do without.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from extproc.api.addresses import parse_address, worker_addresses
from extproc.api.quantities import Duration
from extproc.api.spec import full_key
from extproc.cli.system import raise_limit
from extproc.replication.buses import RedisMissing
from extproc.runtime import app, workers
from extproc.runtime.settings import Settings, Tls, Worker
from extproc.streams.context import GatewayOptions
from extproc.streams.server import ListenFailed
from extproc.streams.tls import CertificateInvalid, TlsFiles

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from extproc.api.load import Directory
    from extproc.api.snapshot import Snapshot


def supervise(words: Sequence[str], count: int) -> int:
    """Run ``count`` workers with these words until a signal."""
    return asyncio.run(workers.supervise(words, count))


def serve(options: argparse.Namespace, directory: Directory, snapshot: Snapshot) -> int:
    """Run one process until a signal; exit status 2 if it cannot start."""
    try:
        uvloop.run(app.serve(_settings(options, directory), snapshot))
    except (CertificateInvalid, ListenFailed, RedisMissing, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _settings(options: argparse.Namespace, config: Directory) -> Settings:
    """Of options that were checked."""
    worker, listen, decisions = None, options.listen, options.decision_log
    listens = [listen]
    metrics = None if options.metrics == "off" else parse_address(options.metrics)
    health = options.health
    if options.worker is not None:
        place, _, directory = options.worker.partition(":")
        number, count = map(int, place.split("/"))
        worker = Worker(number, count, Path(directory))
        listens = worker_addresses(listen, count)
        listen = listens[number]
        metrics = None if metrics is None else (metrics[0], metrics[1] + number)
        health = None if health is None else worker_addresses(health, count)[number]
        decisions = None if decisions is None else decisions.with_name(f"{decisions.name}.{number}")
    return Settings(
        config=config,
        listen=listen,
        descriptors=raise_limit(),
        metrics=metrics,
        drain_s=Duration(options.drain),
        settle_s=Duration(options.settle),
        gateway=GatewayOptions(
            buffered_choices=options.buffered_choices,
            duplex_choices=options.duplex_choices,
            pool=None if options.pool is None else full_key(options.pool),
            overrides_mode=options.mode_override,
            conformance=options.conformance,
            trusts_headers=options.trust_headers,
            whole_bodies=options.whole_bodies,
        ),
        decision_log=decisions,
        decision_share=options.decision_sample,
        shows_reasons=options.debug,
        worker=worker,
        # with --pool, other gateways ask than those that we configure
        listens=() if options.pool is not None else tuple(listens),
        redis=options.redis,
        state=options.state,
        health=health,
        tls=_tls(options),
        redis_channel=options.redis_channel,
    )


def _tls(options: argparse.Namespace) -> Tls | None:
    if options.tls_cert is not None:
        return Tls(TlsFiles(options.tls_cert, options.tls_key))
    return Tls() if options.tls_self_signed else None
