# SPDX-License-Identifier: Apache-2.0
"""``attache epp``: the picker role and extproc in one container, with llm-d's flags."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.gateway.compile.pools import KIND
from extproc.api.patterns import ADVICE, HTTP_PATH
from extproc.api.quantities import Duration
from extproc.engines.dialects import TRITON_BACKEND, engine_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.kube.access import Access
    from extproc.api.picker_config import PickerCheck

Sort = Literal["text", "number", "truth", "duration"]
Fate = Literal["obeyed", "accepted", "refused"]


class Flag(msgspec.Struct, frozen=True):
    """``default``: here, as text. ``fate``: what it comes to; ``note``: how, or why not. A flag that is refused may be
    given with ``harmless``, the value that asks for nothing.
    """

    name: str
    sort: Sort
    fate: Fate
    note: str
    default: str = ""
    harmless: str = ""


FLAGS: Final = (
    Flag("pool-name", "text", "obeyed", "the InferencePool; or --endpoint-selector"),
    Flag("pool-namespace", "text", "obeyed", "its namespace; without it $NAMESPACE, or else `default`"),
    Flag("pool-group", "text", "obeyed", "its API group", "inference.networking.k8s.io"),
    Flag("endpoint-selector", "text", "obeyed", "pods by labels `a=b,c=d`, in place of a pool; no other operators"),
    Flag("endpoint-target-ports", "text", "obeyed", "their ports, with --endpoint-selector"),
    Flag("config-file", "text", "obeyed", "the EndpointPickerConfig; a change of the file is used within a second"),
    Flag("config-text", "text", "obeyed", "the same as text"),
    Flag("grpc-port", "number", "obeyed", "where the gateway calls", "9002"),
    Flag("grpc-health-port", "number", "obeyed", "gRPC's health service, without TLS", "9003"),
    Flag("metrics-port", "number", "obeyed", "extproc's metrics; those of the role are on the next port", "9090"),
    Flag("secure-serving", "truth", "obeyed", "TLS on the gRPC port", "true"),
    Flag("cert-path", "text", "obeyed", "a folder with tls.crt and tls.key; without it the certificate is self-signed"),
    Flag("drain-timeout", "duration", "obeyed", "how long running requests may take to end after SIGTERM", "2m"),
    Flag("refresh-metrics-interval", "duration", "obeyed", "`scrapeInterval` of the pool's ModelServer", "200ms"),
    Flag("total-queued-requests-metric", "text", "obeyed", "says which engine it is: vLLM, SGLang or TensorRT-LLM"),
    Flag("total-running-requests-metric", "text", "obeyed", "the same"),
    Flag("kv-cache-usage-percentage-metric", "text", "obeyed", "the same"),
    Flag("kubeconfig", "text", "obeyed", "where the API server is, outside a cluster"),
    Flag("enable-cert-reload", "truth", "accepted", "certificates are always followed"),
    Flag("health-checking", "truth", "accepted", "the gRPC port always has the health service, too"),
    Flag("lora-info-metric", "text", "accepted", "follows from the engine"),
    Flag("cache-info-metric", "text", "accepted", "follows from the engine"),
    Flag("ha-enable-leader-election", "truth", "accepted", "every replica serves; none stands by"),
    Flag("metrics-staleness-threshold", "duration", "accepted", "old readings lose weight with age"),
    Flag("refresh-prometheus-metrics-interval", "duration", "accepted", "metrics are always up to date"),
    Flag("grpc-max-recv-msg-size", "text", "accepted", "the gateway bounds what a request may have"),
    Flag("grpc-max-send-msg-size", "text", "accepted", "the same"),
    Flag("grpc-enable-compression", "truth", "accepted", "nothing is compressed"),
    Flag(
        "enable-grpc-stream-metrics",
        "truth",
        "accepted",
        "attache_open_streams and attache_stream_seconds are always there",
    ),
    Flag("enable-pprof", "truth", "accepted", "there is none"),
    Flag("tracing", "truth", "accepted", "no traces are sent"),
    Flag("emit-endpoint-scores", "truth", "accepted", "no scores are sent; `attache explain` shows them"),
    Flag("allow-experimental-plugins", "truth", "accepted", "the plugins that there are may be used"),
    Flag(
        "metrics-endpoint-auth", "truth", "accepted", "metrics are served without authentication; use a NetworkPolicy"
    ),
    Flag("v", "number", "accepted", "the log has one level"),
    Flag("zap-devel", "truth", "accepted", "the log has one form"),
    Flag("zap-encoder", "text", "accepted", "the log has one form"),
    Flag("zap-log-level", "text", "accepted", "the log has one level"),
    Flag("zap-stacktrace-level", "text", "accepted", "the log has one form"),
    Flag("zap-time-encoding", "text", "accepted", "the log has one form"),
    Flag("model-server-metrics-scheme", "text", "refused", "metrics are read by plain HTTP", harmless="http"),
    Flag("model-server-metrics-path", "text", "obeyed", "`metricsPath` of the pool's ModelServer"),
    Flag(
        "model-server-metrics-port", "number", "refused", "metrics are read from each endpoint's own port", harmless="0"
    ),
    Flag("model-server-metrics-https-insecure-skip-verify", "truth", "accepted", "metrics are read by plain HTTP"),
    Flag("disable-endpoint-subset-filter", "truth", "refused", "the subset hint is always obeyed", harmless="false"),
    Flag("enable-multi-engine", "truth", "refused", "a pool has one kind of engine", harmless="false"),
    Flag("engine-label-key", "text", "accepted", "a pool has one kind of engine"),
    Flag("metrics-cert-dir", "text", "refused", "metrics have no TLS; use a NetworkPolicy"),
    Flag("metrics-client-ca-file", "text", "refused", "metrics have no TLS; use a NetworkPolicy"),
)
"""Names and meanings are those of llm-d-router's ``pkg/epp/server/options.go`` and of the Inference Extension's before
it.
"""
BY_NAME: Final[Mapping[str, Flag]] = MappingProxyType({one.name: one for one in FLAGS})


class FlagInvalid(Exception):
    """The flags cannot be used; the message says what to write."""


class Given(msgspec.Struct, frozen=True):
    """``values``: of flags that are obeyed, defaults included. ``notes``: a line for each that has no effect."""

    values: Mapping[str, str]
    notes: tuple[str, ...]


def read_flags(words: Sequence[str]) -> Given:
    """Flags as Go's pflag reads them, one dash or two, and ``camelCase`` as of the first versions; raises
    FlagInvalid.
    """
    values = {one.name: one.default for one in FLAGS if one.fate == "obeyed" and one.default}
    notes = []
    for flag, value in _pairs(words):
        _check(flag, value)
        if flag.fate == "refused" and value != flag.harmless:
            raise FlagInvalid(f"--{flag.name}={value}: {flag.note}")
        if flag.fate == "obeyed":
            values[flag.name] = value
        elif flag.fate == "accepted":
            notes.append(f"--{flag.name} has no effect: {flag.note}")
    return Given(values, tuple(notes))


def _pairs(words: Sequence[str]) -> list[tuple[Flag, str]]:
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in {"-", "--"}:
            raise FlagInvalid(f"'{word}' is no flag")
        name, has_value, value = word.lstrip("-").partition("=")
        flag = BY_NAME.get(_kebab(name))
        if flag is None:
            raise FlagInvalid(f"there is no flag '--{name}'")
        if not has_value:
            # a truth takes no word of its own: "--tracing false" means --tracing, and a stray word
            if flag.sort == "truth":
                value = "true"
            elif rest:
                value = rest.pop(0)
            else:
                raise FlagInvalid(f"--{flag.name} needs a value")
        found.append((flag, value.lower() if flag.sort == "truth" else value))
    return found


def _kebab(name: str) -> str:
    """``poolName`` is ``pool-name``."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)


def _check(flag: Flag, value: str) -> None:
    if flag.sort == "truth" and value not in {"true", "false", "1", "0", "t", "f"}:
        raise FlagInvalid(f"--{flag.name}={value}: write true or false")
    if flag.sort == "number" and not value.lstrip("-").isdecimal():
        raise FlagInvalid(f"--{flag.name}={value}: write a number")


def is_true(value: str) -> bool:
    """As Go's ParseBool."""
    return value in {"true", "1", "t"}


POOL_GROUPS: Final = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
_SELECTED: Final = "selected-endpoints"
_METRIC_FLAGS: Final = (
    "total-queued-requests-metric",
    "total-running-requests-metric",
    "kv-cache-usage-percentage-metric",
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``pool``: ``namespace/name``. ``fixed_pool``: the pool itself, where it is no object of the cluster.
    ``server_fields``: of the pool's ModelServer. ``picker_file`` or ``picker_text``: the EndpointPickerConfig, if one
    is given. ``extproc``: its options, without ``--config``. ``metrics``: where the role's metrics are.
    """

    pool: str
    group: str
    fixed_pool: Mapping[str, Any] | None
    server_fields: Mapping[str, Any]
    picker_file: Path | None
    picker_text: str
    extproc: tuple[str, ...]
    metrics: str
    kubeconfig: str = ""


def plan(given: Given, *, namespace: str, address: str, trusts_headers: bool) -> Plan:
    """``namespace``: ours, empty if unknown. ``address``: where ports are opened. Raises FlagInvalid."""
    values = given.values
    selector, name = values.get("endpoint-selector", ""), values.get("pool-name", "")
    if bool(selector) == bool(name):
        raise FlagInvalid("write --pool-name or --endpoint-selector")
    if "config-file" in values and "config-text" in values:
        raise FlagInvalid("--config-file and --config-text: write one of them")
    group = values["pool-group"]
    if group not in POOL_GROUPS:
        raise FlagInvalid(f"--pool-group={group}: write {' or '.join(POOL_GROUPS)}")
    namespace = values.get("pool-namespace") or namespace or "default"
    fixed = None
    if selector:
        name = _SELECTED
        fixed = _fixed_pool(namespace, selector, values.get("endpoint-target-ports", ""))
    pool = f"{namespace}/{name}"
    file = values.get("config-file")
    return Plan(
        pool=pool,
        group=group,
        fixed_pool=fixed,
        server_fields={
            "scrapeInterval": _duration(values, "refresh-metrics-interval"),
            **_metrics_path(values),
            **_engine(values),
        },
        picker_file=None if file is None else Path(file),
        picker_text=values.get("config-text", ""),
        extproc=_extproc(values, pool, address) + (("--trust-headers",) if trusts_headers else ()),
        metrics=f"{address}:{int(values['metrics-port']) + 1}",
        kubeconfig=values.get("kubeconfig", ""),
    )


def for_conformance(planned: Plan) -> Plan:
    """The same for the conformance suite, whose only plugin picks what a header says: extproc does so on request."""
    return msgspec.structs.replace(
        planned, picker_file=None, picker_text="", extproc=(*planned.extproc, "--conformance")
    )


def _extproc(values: Mapping[str, str], pool: str, address: str) -> tuple[str, ...]:
    words = ["--pool", pool, "--wait-for-pool", "--settle", "0s"]
    for option, flag in (("--listen", "grpc-port"), ("--health", "grpc-health-port"), ("--metrics", "metrics-port")):
        words += [option, f"{address}:{values[flag]}"]
    words += ["--drain", _duration(values, "drain-timeout")]
    if is_true(values["secure-serving"]):
        folder = values.get("cert-path")
        pair = ("--tls-cert", f"{folder}/tls.crt", "--tls-key", f"{folder}/tls.key")
        words += pair if folder else ("--tls-self-signed",)
    return tuple(words)


def _duration(values: Mapping[str, str], flag: str) -> str:
    try:
        Duration(values[flag])
    except ValueError:
        raise FlagInvalid(f"--{flag}={values[flag]}: write a duration such as 200ms or 1m30s") from None
    return values[flag]


def _metrics_path(values: Mapping[str, str]) -> dict[str, str]:
    path = values.get("model-server-metrics-path", "")
    if path and re.match(HTTP_PATH, path) is None:
        raise FlagInvalid(f"--model-server-metrics-path={path} {ADVICE[HTTP_PATH]}")
    # Triton's page is where most engines have it; trtllm-serve has its own under another path
    if not path and any(values.get(flag, "").startswith(TRITON_BACKEND) for flag in _METRIC_FLAGS):
        path = "/metrics"
    return {"metricsPath": path} if path else {}


def _engine(values: Mapping[str, str]) -> dict[str, str]:
    """The engine type implied by metric flags; all must agree."""
    found = set()
    for flag in _METRIC_FLAGS:
        metric = values.get(flag, "")
        if metric:
            engine = engine_of(metric)
            if engine is None:
                raise FlagInvalid(f"--{flag}={metric}: no engine that is known here has such a metric")
            found.add(engine)
    if len(found) > 1:
        raise FlagInvalid(f"metrics of {' and '.join(sorted(found))}: a pool has one kind of engine")
    return {"engine": found.pop()} if found else {}


def _fixed_pool(namespace: str, selector: str, ports: str) -> Mapping[str, Any]:
    labels = {}
    for part in selector.split(","):
        name, equals, value = part.strip().partition("=")
        value = value.removeprefix("=")
        if not equals or not name or name.endswith("!") or not value:
            raise FlagInvalid(f"--endpoint-selector={selector}: write labels as a=b,c=d; there are no other operators")
        labels[name] = value
    numbers = list(dict.fromkeys(ports.split(","))) if ports else []
    if not 1 <= len(numbers) <= 8 or not all(one.isdecimal() and 0 < int(one) < 65536 for one in numbers):
        raise FlagInvalid(f"--endpoint-target-ports={ports}: write 1 to 8 ports as 8000,8001")
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": int(one)} for one in numbers]}
    metadata = {"name": _SELECTED, "namespace": namespace}
    return {"apiVersion": f"{POOL_GROUPS[0]}/v1", "kind": KIND, "metadata": metadata, "spec": spec}


DESCRIPTION: Final = (
    "Serve one InferencePool as an endpoint picker of the Gateway API Inference Extension. The flags are those of"
    " llm-d's endpoint picker, so that its image can be replaced by this one."
)
_ROLE_RETRY_S: Final = 1.0
_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - a pod's ports are for others
log = logging.getLogger(__name__)


def parser(prog: str = "attache epp") -> argparse.ArgumentParser:
    """The options, for --help and completion; ``read_flags`` reads them."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=(
            "Exit status: 0 after SIGTERM or SIGINT, 1 if extproc ended by itself, 2 for a mistake in the flags or no "
            "cluster. docs/reference/llm-d-flags.md lists flags that have no effect."
        ),
        allow_abbrev=False,
    )
    _add_own(made)
    for flag in FLAGS:
        shown = flag.note + (f" (default: {flag.default})" if flag.default else "")
        nargs = "?" if flag.sort == "truth" else None
        made.add_argument(
            f"--{flag.name}",
            metavar=flag.sort.upper(),
            nargs=nargs,
            help=shown if flag.fate == "obeyed" else argparse.SUPPRESS,
        )
    return made


def _add_own(made: argparse.ArgumentParser) -> None:
    """Options that llm-d does not have."""
    made.add_argument(
        "--bind-address", metavar="IP", default=_EVERYWHERE, help="where ports are opened (default: %(default)s)"
    )
    made.add_argument(
        "--trust-headers",
        choices=("true", "false"),
        default="true",
        help=(
            "believe headers that say who asks, as llm-d does; the gateway must then write them (default: %(default)s)"
        ),
    )
    made.add_argument(
        "--conformance",
        action="store_true",
        help="for the conformance suite alone: obey the header test-epp-endpoint-selection, and read no plugins",
    )


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0 after a signal, 1 if extproc ended by itself, 2 for a mistake in the flags.

    ``check_picker``: that of extproc.
    """
    if {"--help", "-h"} & set(words):
        parser(prog).parse_args(["--help"])
    ours = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    _add_own(ours)
    options, theirs = ours.parse_known_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        given = read_flags(theirs)
        namespace, trusts = os.environ.get("NAMESPACE", ""), options.trust_headers == "true"
        planned = plan(given, namespace=namespace, address=options.bind_address, trusts_headers=trusts)
        if options.conformance:
            planned = for_conformance(planned)
    except FlagInvalid as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    for note in given.notes:
        log.info("%s", note)
    # the client takes a third of a second to import: not for --help
    from controller.kube.access import find_access, from_kubeconfig  # noqa: PLC0415
    from controller.kube.errors import AccessInvalid  # noqa: PLC0415

    try:
        access = from_kubeconfig(Path(planned.kubeconfig)) if planned.kubeconfig else find_access()
    except AccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="attache-epp-") as folder:
        return asyncio.run(_run(planned, access, Path(folder), check_picker))


async def _run(planned: Plan, access: Access, folder: Path, check_picker: PickerCheck) -> int:
    """extproc as a process of its own, so that following the cluster costs requests nothing; and the role, here."""
    config = folder / "config"
    config.mkdir()
    words = [sys.executable, "-m", "attache", "extproc", "--config", str(config), *planned.extproc]
    extproc = await asyncio.create_subprocess_exec(*words)
    is_stopping = False

    def stop() -> None:
        """A first signal begins the drain of extproc, a second ends it. Pods are followed meanwhile."""
        nonlocal is_stopping
        is_stopping = True
        with contextlib.suppress(ProcessLookupError):
            extproc.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    role = asyncio.create_task(_follow(planned, access, folder, check_picker))
    status = await extproc.wait()
    role.cancel()
    await asyncio.gather(role, return_exceptions=True)
    if not is_stopping:
        log.error("extproc has ended with status %d", status)
    return 0 if is_stopping else 1


async def _follow(planned: Plan, access: Access, folder: Path, check_picker: PickerCheck) -> None:
    """The role, until cancelled. Requests go on without it, so a failure of it is logged, and it begins again."""
    while True:
        try:
            await _run_role(planned, access, folder, check_picker)
        except OSError as error:
            log.error("the picker role cannot listen or write, tried again in %g s: %s", _ROLE_RETRY_S, error)
        except Exception:
            log.exception("the picker role failed, and begins again in %g s; please report this", _ROLE_RETRY_S)
        await asyncio.sleep(_ROLE_RETRY_S)


async def _run_role(planned: Plan, access: Access, folder: Path, check_picker: PickerCheck) -> None:
    from controller.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from controller.gateway.picker_role import CONTROLLER, PickerRole, PickerSettings  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415 - not for --help
    from controller.kube.pages import pages  # noqa: PLC0415

    file = planned.picker_file
    if planned.picker_text:
        file = folder / "picker.yaml"
        await asyncio.to_thread(file.write_text, planned.picker_text)
    settings = PickerSettings(
        config=folder / "config",
        pool=planned.pool,
        group=planned.group,
        picker_file=file,
        # llm-d's service account may read none
        reads_config_maps=False,
        fixed_pool=planned.fixed_pool,
        server_fields=planned.server_fields,
    )
    metrics = GatewayMetrics()
    async with connect(access, manager=CONTROLLER) as client:
        role = PickerRole(client, settings, metrics, check_picker=check_picker)
        async with pages(planned.metrics, metrics.registry, role.ready.is_set):
            await role.run()
