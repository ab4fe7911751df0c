# SPDX-License-Identifier: Apache-2.0
"""``attache manager``: the cluster's side that serves no requests.

It runs engines as objects describe them, and the admission webhooks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.manager.options import SERVICE, parsed, parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Sequence

    from controller.autoscaler.export.role import ExportRole
    from controller.autoscaler.reconciler.records import Records
    from controller.kube.access import Access
    from controller.kube.authorizer import Callers
    from controller.kube.client import Client
    from controller.kube.metrics import ManagerMetrics
    from controller.manager.role import Leader
    from controller.webhooks.certificates import Shows
    from controller.webhooks.role import WebhookRole
    from extproc.api.picker_config import PickerCheck

__all__ = ["main", "parser"]

_API_SERVICE: Final = "v1beta1.external.metrics.k8s.io"


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options. ``check_picker``: that of the extprocs."""
    options = parsed(words, prog)
    # the client takes a third of a second to import: not for --help
    from controller.kube.access import find_access  # noqa: PLC0415
    from controller.kube.errors import AccessInvalid  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        access = find_access()
    except AccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    from controller.kube.kopf_thread import HandlersEnded  # noqa: PLC0415

    failure, status = "", 0
    try:
        asyncio.run(_run(options, access, check_picker))
    except* OSError as group:
        failure, status = f"{options.listen} or {options.metrics} cannot be listened on: {group}", 2
    except* HandlersEnded as group:
        ended = _innermost(group)
        failure, status = f"{ended}: {ended.__cause__!r}", 1
    if failure:
        print(failure, file=sys.stderr)
    return status


def _innermost(error: BaseException) -> BaseException:
    """The first error inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(options: argparse.Namespace, access: Access, check_picker: PickerCheck) -> None:
    from aiohttp.web import RouteDef  # noqa: PLC0415

    from controller.autoscaler.reconciler.pages import routes  # noqa: PLC0415
    from controller.autoscaler.reconciler.records import Records  # noqa: PLC0415
    from controller.commands.gateway import until_signalled  # noqa: PLC0415
    from controller.kube.authorizer import Callers, guarded_by  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415
    from controller.kube.metrics import ManagerMetrics  # noqa: PLC0415
    from controller.kube.pages import pages  # noqa: PLC0415
    from controller.manager.role import (  # noqa: PLC0415
        CONTROLLER,
        ManagerRole,
        own_image,
    )
    from controller.webhooks.role import ServerTls  # noqa: PLC0415

    metrics = ManagerMetrics()
    async with connect(access, manager=CONTROLLER) as client:
        callers = Callers(client, asyncio.get_running_loop().time)
        exports = _exports(options, client, callers)
        page_tls = ServerTls() if options.metrics_auth else None
        others = [one for one in (exports, page_tls) if one is not None]
        webhooks = None if options.no_webhooks else _webhooks(options, client, metrics, check_picker, others)
        leader, more = None, list[RouteDef]()
        if not options.no_work:
            image = options.image or await own_image(client, socket.gethostname())
            records = Records()
            leader = _leader(options, client, metrics, image, records)
            more = [] if options.no_scaling else [*routes(records, leader.leads)]
        role = ManagerRole(webhooks, leader, exports)
        guard = guarded_by(callers) if page_tls else None
        tls = page_tls.context if page_tls else None
        async with pages(options.metrics, metrics.registry, role.is_ready, more=more, tls=tls, guard=guard):
            await until_signalled(role.run())


def _exports(options: argparse.Namespace, client: Client, callers: Callers) -> ExportRole | None:
    if not options.external_metrics and not options.keda:
        return None
    from controller.autoscaler.export.keda import TlsFiles  # noqa: PLC0415
    from controller.autoscaler.export.keda_access import readers_of  # noqa: PLC0415
    from controller.autoscaler.export.role import ExportRole, ExportSettings  # noqa: PLC0415

    tls = None
    if options.keda_certificate:
        clients = Path(options.keda_clients) if options.keda_clients else None
        tls = TlsFiles(Path(options.keda_certificate), Path(options.keda_key), clients)
    settings = ExportSettings(
        external_metrics=options.external_metrics,
        keda=options.keda,
        keda_tls=tls,
        keda_readers=readers_of(options.keda_namespace, options.keda_client_name),
        keda_streams=options.keda_streams,
        namespace=options.watch_namespace,
    )
    return ExportRole(client, settings, callers)


def _webhooks(
    options: argparse.Namespace,
    client: Client,
    metrics: ManagerMetrics,
    check_picker: PickerCheck,
    others: Sequence[Shows],
) -> WebhookRole:
    from controller.webhooks.certificates import RotationSettings  # noqa: PLC0415
    from controller.webhooks.role import WebhookRole, WebhookSettings  # noqa: PLC0415

    namespace = options.namespace or client.access.namespace
    rotation = RotationSettings(
        namespace=namespace,
        secret=options.secret,
        configuration=options.webhook_configuration,
        names=tuple(options.host) or (f"{SERVICE}.{namespace}.svc",),
        api_service=_API_SERVICE if options.external_metrics else "",
    )
    settings = WebhookSettings(listen=options.listen, rotation=rotation)
    return WebhookRole(client, settings, metrics, check_picker=check_picker, others=others)


def _leader(
    options: argparse.Namespace, client: Client, metrics: ManagerMetrics, image: str, records: Records
) -> Leader:
    from controller.kube.lease import LeaderElection, LeaseTiming  # noqa: PLC0415
    from controller.manager.role import Leader, kopf_source  # noqa: PLC0415
    from controller.models.controller import Decisions, ModelControllerSettings  # noqa: PLC0415
    from controller.models.model import observed as of_models  # noqa: PLC0415
    from controller.models.model import reconcile as models  # noqa: PLC0415
    from controller.models.model_infer import reconcile as model_infers  # noqa: PLC0415

    long_s = float(options.lease_duration)
    election = LeaderElection(
        client,
        namespace=options.lease_namespace or client.access.namespace,
        name=options.lease,
        identity=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        timing=LeaseTiming(long_s, renew_deadline_s=long_s * 2 / 3, retry_s=long_s * 2 / 15),
    )
    settings = ModelControllerSettings(
        namespace=options.watch_namespace,
        workers=options.workers,
        shared_namespace=client.access.namespace,
        gateway_namespaces=tuple(options.gateway_namespace) or (client.access.namespace,),
        models=of_models.Settings(image=image),
    )
    decisions = Decisions(model_infers.reconcile, models.reconcile)
    source = kopf_source(client, options.watch_namespace)
    scaling = None if options.no_scaling else _scaling(options, client, metrics, records)
    return Leader(client, settings, metrics, election, decisions=decisions, source=source, scaling=scaling)


def _scaling(
    options: argparse.Namespace, client: Client, metrics: ManagerMetrics, records: Records
) -> Callable[[Client], Awaitable[None]]:
    from controller.autoscaler.reconciler.metric_sources import SourceSettings  # noqa: PLC0415
    from controller.autoscaler.reconciler.metrics import ScalingMetrics  # noqa: PLC0415
    from controller.autoscaler.reconciler.scaling import ScalingSettings, scaling_of  # noqa: PLC0415

    settings = ScalingSettings(
        sources=SourceSettings(prometheus_allow=tuple(options.prometheus_allow)),
        namespace=options.watch_namespace,
        gateway_namespaces=tuple(options.gateway_namespace) or (client.access.namespace,),
    )
    return scaling_of(settings, ScalingMetrics(metrics.registry), records)
