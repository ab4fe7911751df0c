# SPDX-License-Identifier: Apache-2.0
"""From the command's options to a process that serves.

Loading this module loads gRPC and Envoy's schema; the other modules of the command line do without.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from extproc.api.addresses import worker_addresses
from extproc.api.quantities import Duration
from extproc.api.spec import qualified_key
from extproc.api.tracing import parse_otlp
from extproc.cli.common import parse_metrics_address, raise_descriptor_limit, set_process_name
from extproc.listen_sockets import ListenFailed
from extproc.replication.buses import RedisUnusable
from extproc.runtime import app
from extproc.runtime.app import GrpcTls, Settings
from extproc.runtime.worker_settings import WorkerSettings
from extproc.streams.stream_dependencies import GatewayOptions
from extproc.streams.tls import CertificateInvalid, TlsFiles, TlsRequirements

if TYPE_CHECKING:
    import argparse

    from extproc.api.config_loader import ConfigSource
    from extproc.api.config_snapshot import Snapshot

# Envoy checks every second who is healthy.
_NOTICE_S: Final = 3.0


def run_process_until_signal(options: argparse.Namespace, directory: ConfigSource, snapshot: Snapshot) -> int:
    """Run one process until a signal; exit status 2 if it cannot start."""
    worker = None if options.worker is None else msgspec.json.decode(options.worker, type=WorkerSettings)
    if worker is not None:
        set_process_name(f"worker-{worker.number}")
        for descriptor in worker.others:
            os.close(descriptor)
    try:
        uvloop.run(app.serve(_settings(options, directory, worker), snapshot))
    except (CertificateInvalid, ListenFailed, RedisUnusable, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _settings(options: argparse.Namespace, config: ConfigSource, worker: WorkerSettings | None) -> Settings:
    """Of options that were checked."""
    listen, decisions = options.listen, options.decision_log
    listens = [listen]
    metrics = parse_metrics_address(options.metrics)
    health = options.health
    if worker is not None:
        number, count = worker.number, worker.workers
        listens = worker_addresses(listen, count)
        listen = listens[number]
        metrics = (metrics[0], metrics[1] + number) if isinstance(metrics, tuple) else metrics
        health = None if health is None else worker_addresses(health, count)[number]
        if decisions is not None and count > 1:
            decisions = decisions.with_name(f"{decisions.name}.{number}")
    return Settings(
        config=config,
        listen=listen,
        descriptors=raise_descriptor_limit(),
        metrics=metrics,
        grace_s=_grace_s(options),
        drain_s=Duration(options.drain),
        settle_s=Duration(options.settle),
        gateway=GatewayOptions(
            buffered_choices=options.buffered_choices,
            duplex_choices=options.duplex_choices,
            pool=None if options.pool is None else qualified_key(options.pool),
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
        console_token=options.console_token,
        health=health,
        tls=_tls(options),
        redis_channel=options.redis_channel,
        has_llm_d_names=options.llm_d_metrics,
        files=options.files,
        otlp=None if options.otlp is None else parse_otlp(options.otlp, os.environ),
    )


def _grace_s(options: argparse.Namespace) -> float:
    """By default none where no other process takes over: Envoy would use none of them for so long."""
    if options.grace is not None:
        return Duration(options.grace)
    return _NOTICE_S if (options.workers or 1) > 1 or options.pool is not None else 0.0


def _tls(options: argparse.Namespace) -> GrpcTls | None:
    limits = TlsRequirements(options.tls_min_version, options.tls_ciphers)
    if options.tls_cert is not None:
        return GrpcTls(TlsFiles(options.tls_cert, options.tls_key), limits)
    return GrpcTls(limits=limits) if options.tls_self_signed else None
