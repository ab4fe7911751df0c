# SPDX-License-Identifier: Apache-2.0
"""Exports of the manager role: every replica serves them from the statuses of bindings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.export.desired_replicas import (
    DesiredReplicasStore,
    ExportedTarget,
    ExportedTargets,
    desired_by_target,
)
from controller.autoscaler.export.external_metrics import ExternalMetricsServer
from controller.autoscaler.export.keda import KedaScaler, TlsFiles, server_credentials
from controller.autoscaler.export.keda_access import MOST_STREAMS, ReadPermissions
from controller.kube.api_resources import AUTOSCALING_POLICY_BINDINGS, Object, partial_metadata
from controller.kube.informer import Informer, InformerTiming, Selection

if TYPE_CHECKING:
    from controller.kube.authorizer import RequestAuthorizer
    from controller.kube.client import Client
    from controller.webhooks.certificates import KeyPair


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``external_metrics`` and ``keda``: addresses to listen on; empty: not served. ``keda_tls``: files for KEDA's
    port; None: without TLS. ``keda_readers``: authorisation there. ``keda_streams``: most open streams. ``namespace``:
    the one whose bindings are exported; None: all.
    """

    external_metrics: str = ""
    keda: str = ""
    keda_tls: TlsFiles | None = None
    keda_readers: ReadPermissions = ReadPermissions()
    keda_streams: int = MOST_STREAMS
    namespace: str | None = None
    informers: InformerTiming = InformerTiming()


class ExportServer:
    """``run`` does all of it. ``set_certificate`` gets the certificate of the external metrics API."""

    def __init__(self, client: Client, settings: ExportSettings, callers: RequestAuthorizer) -> None:
        self._settings = settings
        self._decisions = DesiredReplicasStore()
        self._exports = ExportedTargets(self._changed)
        self._informer = Informer(
            client,
            AUTOSCALING_POLICY_BINDINGS,
            Selection(namespace=settings.namespace),
            timing=settings.informers,
            transform=_trimmed_binding,
        )
        self._informer.subscribe(lambda key: self._exports.set_binding(key, self._informer.get(key)))
        address = settings.external_metrics
        self._server = ExternalMetricsServer(client, address, self._exports, callers) if address else None
        self._is_ready = False

    def set_certificate(self, pair: KeyPair) -> None:
        """The certificate to show from now on; raises OSError."""
        if self._server is not None:
            self._server.set_certificate(pair)

    def is_ready(self) -> bool:
        """Whether all servers listen and have data."""
        return self._is_ready and (self._server is None or self._server.ready.is_set())

    async def run(self) -> None:
        """Serve until cancelled; raises OSError if an address is taken, or files are no certificates."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._informer.run(), name="bindings for exports")
            await self._informer.synced.wait()
            if self._server is not None:
                tasks.create_task(self._server.run(), name="external metrics API")
            if self._settings.keda:
                tasks.create_task(self._keda(), name="KEDA's external scaler")
            self._is_ready = True

    async def _keda(self) -> None:
        settings, tls = self._settings, self._settings.keda_tls
        scaler = KedaScaler(self._decisions, readers=settings.keda_readers, most_streams=settings.keda_streams)
        try:
            credentials = None if tls is None else server_credentials(tls)
        except ValueError as error:
            raise OSError(f"the certificate for KEDA's port cannot be used: {error}") from None
        await scaler.start(self._settings.keda, credentials)
        try:
            await asyncio.Event().wait()
        finally:
            await scaler.stop()

    def _changed(self, key: str, targets: tuple[ExportedTarget, ...] | None) -> None:
        if not targets:
            self._decisions.forget(key)
            return
        self._decisions.set_desired(key, desired_by_target({one.target: one.desired for one in targets}))


def _trimmed_binding(binding: Object) -> Object:
    return {
        "metadata": partial_metadata(binding),
        "spec": binding.get("spec") or {},
        "status": binding.get("status") or {},
    }
