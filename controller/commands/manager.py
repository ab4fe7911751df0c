# SPDX-License-Identifier: Apache-2.0
"""``attache manager``: the cluster's side that serves no requests.

It runs engines as objects describe them, and the admission webhooks.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.audit import add_audit_option, open_audit
from controller.autoscaler.export.keda_access import MOST_STREAMS
from extproc.api.addresses import is_hostname, parse_address
from extproc.logs import add_log_options, start_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.export.server import ExportServer
    from controller.autoscaler.reconciler.controller import Scaling
    from controller.autoscaler.reconciler.decision_records import DecisionRecords
    from controller.kube.authorizer import RequestAuthorizer
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess
    from controller.kube.manager_metrics import ManagerMetrics
    from controller.manager.runner import LeaderControllers
    from controller.webhooks.certificates import CertificateConsumer
    from controller.webhooks.server import WebhookServer
    from extproc.api.picker_config import PickerConfigChecker

SERVICE: Final = "attache-manager"
__all__ = ["main", "parser"]
_LARGEST_PORT: Final = 65535
_API_SERVICE: Final = "v1beta1.external.metrics.k8s.io"


def parser(prog: str = "attache manager") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Reconcile Models and ModelInfers: one replica, elected by a Lease, creates, changes and deletes their "
            "objects, and scales what AutoscalingPolicyBindings name. Every replica serves the admission webhooks of"
            " our kinds: mistakes that a schema cannot find are refused by the API server, and references to objects"
            " that are not there are warned of."
        ),
        epilog="Exit status: 0, 1 if the work ended unexpectedly, or 2 for a mistake in the options or no cluster.",
    )
    _add_webhooks(made)
    _add_work(made)
    _add_exports(made)
    add_audit_option(made)
    add_log_options(made)
    return made


def _add_webhooks(made: argparse.ArgumentParser) -> None:
    """And the server beside them."""
    add = made.add_argument
    add("--listen", metavar="ADDRESS", default="0.0.0.0:9443", help="of the webhooks; default: %(default)s")
    add(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help=(
            "by which API servers call this server, for its certificate; may be repeated; "
            f"default: {SERVICE}.NAMESPACE.svc"
        ),
    )
    add("--namespace", metavar="NAME", help="of the Secret with the certificates; default: ours")
    add(
        "--secret",
        metavar="NAME",
        default="attache-webhook-certificates",
        help="the Secret with the certificates, which must be there; default: %(default)s",
    )
    add(
        "--webhook-configuration",
        metavar="NAME",
        default="attache",
        help="the ValidatingWebhookConfiguration that gets the authorities of the certificates; default: %(default)s",
    )
    add("--metrics", metavar="ADDRESS", default="127.0.0.1:9006", help="metrics and health; default: %(default)s")
    add(
        "--metrics-auth",
        action="store_true",
        help=(
            "serve metrics and pages over HTTPS, only to callers with a token and the right to get them "
            "(nonResourceURLs); needs the webhooks for their certificate"
        ),
    )
    add("--no-webhooks", action="store_true", help="other processes serve the webhooks")


def _host(text: str) -> str:
    """It becomes an argument of programs, which take it for part of a URL."""
    host, colon, port = text.partition(":")
    is_known = is_hostname(host) or all(part.isdecimal() for part in host.split("."))
    if not is_known or (colon and not (port.isdecimal() and 0 < int(port) <= _LARGEST_PORT)):
        raise argparse.ArgumentTypeError(f"{text!a} is no address; write HOST or HOST:PORT")
    return text


def _add_work(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("Models, ModelInfers and AutoscalingPolicyBindings").add_argument
    add("--no-work", action="store_true", help="other processes reconcile these kinds")
    add(
        "--watch-namespace", metavar="NAME", help="reconcile only objects of this namespace; default: of all namespaces"
    )
    add(
        "--workers",
        metavar="N",
        type=_positive,
        default=8,
        help="objects reconciled at the same time; default: %(default)s",
    )
    add(
        "--image",
        metavar="IMAGE",
        help="of downloads and sidecars; default: that of the container 'manager' of our pod",
    )
    add(
        "--gateway-namespace",
        metavar="NAME",
        action="append",
        default=[],
        help=(
            "trust gateways of this namespace about engines of all namespaces (loads, and addresses of Models), and "
            "others only about their own; may be repeated; default: ours"
        ),
    )
    add(
        "--steps",
        metavar="HOST[:PORT]",
        type=_host,
        help=(
            "where transformers and explainers of Models reach a gateway, 'steps' of its GatewayConfig;"
            " default: attache-gateway-steps.NAMESPACE.svc, in our namespace"
        ),
    )
    add("--no-scaling", action="store_true", help="other processes reconcile AutoscalingPolicyBindings")
    add(
        "--prometheus-allow",
        metavar="URL",
        action="append",
        default=[],
        help=(
            "AutoscalingPolicies may name only this Prometheus and URLs below it; may be repeated; default: all "
            "except this machine and link-local addresses"
        ),
    )
    add("--lease", metavar="NAME", default=SERVICE, help="the Lease that elects the leader; default: %(default)s")
    add("--lease-namespace", metavar="NAME", help="of the Lease; default: ours")
    add(
        "--lease-duration",
        metavar="SECONDS",
        type=_positive,
        default=15,
        help="after which another replica takes over from a leader that is gone; default: %(default)s",
    )


def _add_exports(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("other autoscalers, for policies with the mode Export").add_argument
    add(
        "--external-metrics",
        metavar="ADDRESS",
        default="",
        help=(
            "serve external.metrics.k8s.io for HorizontalPodAutoscalers; needs the webhooks for their certificate; "
            "default: not served"
        ),
    )
    add("--keda", metavar="ADDRESS", default="", help="serve KEDA's external scaler (gRPC); default: not served")
    add("--keda-certificate", metavar="FILE", help="of KEDA's port, with --keda-key; default: without TLS")
    add("--keda-key", metavar="FILE", help="of the certificate")
    add(
        "--keda-clients",
        metavar="FILE",
        help="authorities of the clients that may call KEDA's port; default: all clients may",
    )
    add(
        "--keda-client-name",
        metavar="NAME[=NAMESPACE,...]",
        action="append",
        default=[],
        help=(
            "who may call KEDA's port: a name in the client's certificate (common name or alternative name), and the"
            " namespaces that it may ask about, without them all; may be repeated; needs --keda-clients;"
            " default: any name"
        ),
    )
    add(
        "--keda-namespace",
        metavar="NAME",
        action="append",
        default=[],
        help="serve decisions of this namespace at KEDA's port; may be repeated; default: of all namespaces",
    )
    add(
        "--keda-streams",
        metavar="N",
        type=_positive,
        default=MOST_STREAMS,
        help=(
            "streams at KEDA's port at a time, half of them of one caller, an eighth about one namespace; default: "
            "%(default)s"
        ),
    )


def parse_options(words: list[str], prog: str) -> argparse.Namespace:
    """Ends the process with status 2 for a mistake in them."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        for address in (options.listen, options.metrics, options.external_metrics, options.keda):
            if address:
                parse_address(address)
        if options.prometheus_allow:
            from controller.autoscaler.reconciler.metric_source_http import AddressPolicy  # noqa: PLC0415 - not for --help

            AddressPolicy(options.prometheus_allow)
        if options.keda_client_name:
            from controller.autoscaler.export.keda_access import parse_read_permissions  # noqa: PLC0415 - not for --help

            parse_read_permissions((), options.keda_client_name)
    except ValueError as error:
        made.error(str(error))
    if options.no_webhooks and (options.metrics_auth or options.external_metrics):
        made.error("--metrics-auth and --external-metrics need the webhooks' certificate: leave out --no-webhooks")
    if bool(options.keda_certificate) != bool(options.keda_key):
        made.error("write --keda-certificate and --keda-key together")
    if options.keda_clients and not options.keda_certificate:
        made.error("--keda-clients needs --keda-certificate and --keda-key")
    if options.keda_client_name and not options.keda_clients:
        made.error("--keda-client-name needs --keda-clients, the authorities of these certificates")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def main(words: list[str], prog: str, check_picker: PickerConfigChecker) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options. ``check_picker``: that of the extprocs."""
    options = parse_options(words, prog)
    # the client takes a third of a second to import: not for --help
    from controller.kube.cluster_access import find_access  # noqa: PLC0415
    from controller.kube.errors import ClusterAccessInvalid  # noqa: PLC0415

    start_logging(options)
    try:
        access = find_access()
    except ClusterAccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    from controller.kube.kopf_thread import KopfEnded  # noqa: PLC0415

    failure, status = "", 0
    try:
        asyncio.run(_run(options, access, check_picker))
    except* OSError as group:
        failure, status = f"{options.listen} or {options.metrics} cannot be listened on: {group}", 2
    except* KopfEnded as group:
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


async def _run(options: argparse.Namespace, access: ClusterAccess, check_picker: PickerConfigChecker) -> None:
    from aiohttp.web import RouteDef  # noqa: PLC0415

    from controller.autoscaler.reconciler.decision_records import DecisionRecords, decision_page_routes  # noqa: PLC0415
    from controller.commands.gateway import run_until_signalled  # noqa: PLC0415
    from controller.kube.authorizer import RequestAuthorizer, authorization_middleware  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415
    from controller.kube.manager_metrics import ManagerMetrics, observe_api_calls  # noqa: PLC0415
    from controller.kube.metrics_and_health import serve_pages  # noqa: PLC0415
    from controller.manager.runner import (  # noqa: PLC0415
        CONTROLLER,
        ManagerRunner,
        find_own_image,
    )
    from controller.models import rollouts_page  # noqa: PLC0415
    from controller.webhooks.server import ServerTls  # noqa: PLC0415

    metrics = ManagerMetrics()
    async with AsyncExitStack() as opened:
        audit = opened.enter_context(open_audit(options.audit_log, metrics.registry))
        observed = observe_api_calls(metrics.registry)
        client = await opened.enter_async_context(connect(access, manager=CONTROLLER, audit=audit, observed=observed))
        callers = RequestAuthorizer(client, asyncio.get_running_loop().time)
        exports = _exports(options, client, callers)
        page_tls = ServerTls() if options.metrics_auth else None
        others = [one for one in (exports, page_tls) if one is not None]
        webhooks = None if options.no_webhooks else _webhooks(options, client, metrics, check_picker, others)
        leader, more = None, list[RouteDef]()
        if not options.no_work:
            image = options.image or await find_own_image(client, socket.gethostname())
            records = DecisionRecords()
            leader = _leader(options, client, metrics, image, records)
            scaling = () if options.no_scaling else decision_page_routes(records, leader.leads)
            more = [*scaling, *rollouts_page.rollout_page_routes(leader.objects, leader.leads)]
        role = ManagerRunner(webhooks, leader, exports)
        guard = authorization_middleware(callers) if page_tls else None
        tls = page_tls.context if page_tls else None
        async with serve_pages(options.metrics, metrics.registry, role.is_ready, more=more, tls=tls, guard=guard):
            await run_until_signalled(role.run())


def _exports(options: argparse.Namespace, client: Client, callers: RequestAuthorizer) -> ExportServer | None:
    if not options.external_metrics and not options.keda:
        return None
    from controller.autoscaler.export.keda import TlsFiles  # noqa: PLC0415
    from controller.autoscaler.export.keda_access import parse_read_permissions  # noqa: PLC0415
    from controller.autoscaler.export.server import ExportServer, ExportSettings  # noqa: PLC0415

    tls = None
    if options.keda_certificate:
        clients = Path(options.keda_clients) if options.keda_clients else None
        tls = TlsFiles(Path(options.keda_certificate), Path(options.keda_key), clients)
    settings = ExportSettings(
        external_metrics=options.external_metrics,
        keda=options.keda,
        keda_tls=tls,
        keda_readers=parse_read_permissions(options.keda_namespace, options.keda_client_name),
        keda_streams=options.keda_streams,
        namespace=options.watch_namespace,
    )
    return ExportServer(client, settings, callers)


def _webhooks(
    options: argparse.Namespace,
    client: Client,
    metrics: ManagerMetrics,
    check_picker: PickerConfigChecker,
    others: Sequence[CertificateConsumer],
) -> WebhookServer:
    from controller.webhooks.certificates import RotationSettings  # noqa: PLC0415
    from controller.webhooks.server import WebhookServer, WebhookSettings  # noqa: PLC0415

    namespace = options.namespace or client.access.namespace
    rotation = RotationSettings(
        namespace=namespace,
        secret=options.secret,
        configuration=options.webhook_configuration,
        names=tuple(options.host) or (f"{SERVICE}.{namespace}.svc",),
        api_service=_API_SERVICE if options.external_metrics else "",
    )
    settings = WebhookSettings(listen=options.listen, rotation=rotation)
    return WebhookServer(client, settings, metrics, check_picker=check_picker, others=others)


def _leader(
    options: argparse.Namespace, client: Client, metrics: ManagerMetrics, image: str, records: DecisionRecords
) -> LeaderControllers:
    from controller.kube.leader_election import LeaderElection, LeaseTiming  # noqa: PLC0415
    from controller.manager.runner import LeaderControllers, kopf_source  # noqa: PLC0415
    from controller.models.controller import DecisionFunctions, ModelControllerSettings  # noqa: PLC0415
    from controller.models.model import model_state as of_models  # noqa: PLC0415
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
        models=of_models.ModelSettings(
            image=image, steps=options.steps or f"{of_models.STEPS_SERVICE}.{client.access.namespace}.svc"
        ),
    )
    decisions = DecisionFunctions(model_infers.reconcile, models.reconcile)
    source = kopf_source(client, options.watch_namespace)
    scaling = None if options.no_scaling else _scaling(options, client, metrics, records)
    return LeaderControllers(client, settings, metrics, election, decisions=decisions, source=source, scaling=scaling)


def _scaling(options: argparse.Namespace, client: Client, metrics: ManagerMetrics, records: DecisionRecords) -> Scaling:
    from controller.autoscaler.reconciler.controller import ScalingSettings, make_scaling_runner  # noqa: PLC0415
    from controller.autoscaler.reconciler.metric_sources import SourceSettings  # noqa: PLC0415
    from controller.autoscaler.reconciler.metrics import ScalingMetrics  # noqa: PLC0415

    settings = ScalingSettings(
        sources=SourceSettings(prometheus_allow=tuple(options.prometheus_allow)),
        namespace=options.watch_namespace,
        gateway_namespaces=tuple(options.gateway_namespace) or (client.access.namespace,),
    )
    return make_scaling_runner(settings, ScalingMetrics(metrics.registry), records)
