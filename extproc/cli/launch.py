# SPDX-License-Identifier: Apache-2.0
"""From the command's options to running processes: one, or several behind one Envoy (``--workers N``).

Loading this module loads gRPC and Envoy's schema; the other modules of the command line do without. Each worker has an
address of its own; Envoy balances over them, and one that ends is started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from extproc.api.addresses import worker_addresses
from extproc.api.quantities import Duration
from extproc.api.spec import full_key
from extproc.api.tracing import parse_otlp
from extproc.cli.supervisor import Child, Program, notify_ready, restart_one_by_one
from extproc.cli.system import metrics_address, raise_limit
from extproc.ports import ListenFailed
from extproc.replication.buses import RedisUnusable
from extproc.runtime import app
from extproc.runtime.app import Settings, Tls, Worker
from extproc.streams.context import GatewayOptions
from extproc.streams.tls import CertificateInvalid, TlsFiles, TlsLimits

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from extproc.api.load import Directory
    from extproc.api.snapshot import Snapshot

# Envoy checks every second who is healthy.
NOTICE_S: Final = 3.0


async def _supervise(words: Sequence[str], workers: int) -> int:
    """Run ``python -m extproc`` with ``words`` N times until a signal; their exit status if all gave up. SIGUSR1
    restarts them one by one.
    """
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="attache-") as directory:
        children = [Child(_worker(words, number, workers, directory), Path(directory)) for number in range(workers)]

        def stop(number: signal.Signals) -> None:
            for child in children:
                child.stop(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        runs = [asyncio.create_task(child.run()) for child in children]
        restarts = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, restarts.set)
        rolling = asyncio.create_task(_roll(children, restarts))
        results = await asyncio.gather(*runs)
        rolling.cancel()
    return max(results)


async def _roll(children: Sequence[Child], wanted: asyncio.Event) -> None:
    """Report once that all are ready, and restart them whenever ``wanted`` is set, until cancelled."""
    for child in children:
        await child.ready.wait()
    notify_ready(os.environ)
    while True:
        await wanted.wait()
        wanted.clear()
        await restart_one_by_one(children, NOTICE_S)


def _worker(words: Sequence[str], number: int, workers: int, directory: str) -> Program:
    place = f"{number}/{workers}:{directory}"
    return Program(f"worker-{number}", (sys.executable, "-m", "extproc", *words, "--worker", place))


def supervise(words: Sequence[str], count: int) -> int:
    """Run ``count`` workers with these words until a signal."""
    return asyncio.run(_supervise(words, count))


def serve(options: argparse.Namespace, directory: Directory, snapshot: Snapshot) -> int:
    """Run one process until a signal; exit status 2 if it cannot start."""
    try:
        uvloop.run(app.serve(_settings(options, directory), snapshot, lambda: notify_ready(os.environ)))
    except (CertificateInvalid, ListenFailed, RedisUnusable, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _settings(options: argparse.Namespace, config: Directory) -> Settings:
    """Of options that were checked."""
    worker, listen, decisions = None, options.listen, options.decision_log
    listens = [listen]
    metrics = metrics_address(options.metrics)
    health = options.health
    if options.worker is not None:
        place, _, directory = options.worker.partition(":")
        number, count = map(int, place.split("/"))
        worker = Worker(number, count, Path(directory))
        listens = worker_addresses(listen, count)
        listen = listens[number]
        metrics = (metrics[0], metrics[1] + number) if isinstance(metrics, tuple) else metrics
        health = None if health is None else worker_addresses(health, count)[number]
        decisions = None if decisions is None else decisions.with_name(f"{decisions.name}.{number}")
    return Settings(
        config=config,
        listen=listen,
        descriptors=raise_limit(),
        metrics=metrics,
        grace_s=_grace_s(options),
        drain_s=Duration(options.drain),
        settle_s=Duration(options.settle),
        gateway=GatewayOptions(
            buffered_choices=options.buffered_choices,
            duplex_choices=options.duplex_choices,
            pool=None if options.pool is None else full_key(options.pool),
            conformance=options.conformance,
            trusts_headers=options.trust_headers,
            whole_bodies=options.whole_bodies,
            shadows=options.shadow,
            emits_scores=options.endpoint_scores,
        ),
        decision_log=decisions,
        decision_share=options.decision_sample,
        shows_reasons=options.debug,
        worker=worker,
        # with --pool, requests come from other gateways than those that we configure
        listens=() if options.pool is not None else tuple(listens),
        redis=options.redis,
        state=options.state,
        usage_api=options.usage_api,
        manager=options.manager,
        health=health,
        tls=_tls(options),
        redis_channel=options.redis_channel,
        has_llm_d_names=options.llm_d_metrics,
        files=options.files,
        otlp=None if options.otlp is None else parse_otlp(options.otlp),
    )


def _grace_s(options: argparse.Namespace) -> float:
    """By default none where no other process takes over: Envoy would use none of them for so long."""
    if options.grace is not None:
        return Duration(options.grace)
    return NOTICE_S if options.workers > 1 or options.pool is not None else 0.0


def _tls(options: argparse.Namespace) -> Tls | None:
    limits = TlsLimits(options.tls_min_version, options.tls_ciphers)
    if options.tls_cert is not None:
        return Tls(TlsFiles(options.tls_cert, options.tls_key), limits)
    return Tls(limits=limits) if options.tls_self_signed else None
