# SPDX-License-Identifier: Apache-2.0
"""The options of ``attache manager``."""

from __future__ import annotations

import argparse
from typing import Final

from controller.autoscaler.export.keda_access import MOST_STREAMS
from extproc.api.addresses import parse_address

SERVICE: Final = "attache-manager"


def parser(prog: str = "attache manager") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Look after Models and ModelInfers: one replica, which a Lease elects, makes, changes and deletes what they"
            " ask for, and scales what AutoscalingPolicyBindings name. Every replica serves the admission webhooks of"
            " our kinds: mistakes that a schema cannot find are refused by the API server, and references to objects"
            " that are not there are warned of."
        ),
        epilog="Exit status: 0, 1 if the work has ended by itself, or 2 for a mistake in the options or no cluster.",
    )
    _add_webhooks(made)
    _add_work(made)
    _add_exports(made)
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
            "by which API servers call this server, for its certificate; several times for several; "
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
            "serve metrics and pages with HTTPS, and only to those whose token may get them (nonResourceURLs); needs "
            "the webhooks, whose certificate it shows"
        ),
    )
    add("--no-webhooks", action="store_true", help="other processes serve the webhooks")


def _add_work(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("Models, ModelInfers and AutoscalingPolicyBindings").add_argument
    add("--no-work", action="store_true", help="other processes look after all of these")
    add("--watch-namespace", metavar="NAME", help="whose objects are looked after; default: those of all namespaces")
    add(
        "--workers", metavar="N", type=_positive, default=8, help="objects looked at side by side; default: %(default)s"
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
            "whose gateways are believed about engines of all namespaces: their loads, and where Models are reached; "
            "gateways elsewhere are believed about their own namespace; several times for several; default: ours"
        ),
    )
    add("--no-scaling", action="store_true", help="other processes look after AutoscalingPolicyBindings")
    add(
        "--prometheus-allow",
        metavar="URL",
        action="append",
        default=[],
        help=(
            "AutoscalingPolicies may name this Prometheus, and what is below this URL, and no other; several times for "
            "several; default: all but this machine itself and link-local addresses"
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
            "serve external.metrics.k8s.io for HorizontalPodAutoscalers; needs the webhooks, whose certificate it"
            " shows; default: not served"
        ),
    )
    add("--keda", metavar="ADDRESS", default="", help="serve KEDA's external scaler (gRPC); default: not served")
    add("--keda-certificate", metavar="FILE", help="of KEDA's port, with --keda-key; default: without TLS")
    add("--keda-key", metavar="FILE", help="of the certificate")
    add("--keda-clients", metavar="FILE", help="authorities of those who may call KEDA's port; default: anybody may")
    add(
        "--keda-client-name",
        metavar="NAME[=NAMESPACE,...]",
        action="append",
        default=[],
        help=(
            "who may call KEDA's port: a name in the client's certificate (common name or alternative name), and the"
            " namespaces that it may ask about, without them all; several times for several; needs --keda-clients;"
            " default: any name"
        ),
    )
    add(
        "--keda-namespace",
        metavar="NAME",
        action="append",
        default=[],
        help="whose decisions are told at KEDA's port; several times for several; default: those of all namespaces",
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


def parsed(words: list[str], prog: str) -> argparse.Namespace:
    """Ends the process with status 2 for a mistake in them."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        for address in (options.listen, options.metrics, options.external_metrics, options.keda):
            if address:
                parse_address(address)
        if options.prometheus_allow:
            from controller.autoscaler.reconciler.source_http import Allowed  # noqa: PLC0415 - not for --help

            Allowed(options.prometheus_allow)
        if options.keda_client_name:
            from controller.autoscaler.export.keda_access import readers_of  # noqa: PLC0415 - not for --help

            readers_of((), options.keda_client_name)
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
