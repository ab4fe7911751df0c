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
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from controller.commands.llm_d_picker_flags import FLAGS, EppFlags, FlagInvalid, is_true, read_flags, tls_options
from controller.gateway.compile.file_discovery import DiscoveryInvalid, parse_file_discovery, pool_name
from controller.gateway.compile.inference_pools import KIND, SETTINGS, parse_pool_settings
from extproc.api.addresses import join_host_port
from extproc.api.config_errors import ConfigInvalid
from extproc.api.document_decoder import read_picker_file
from extproc.api.quantities import Duration
from extproc.api.spec import ADVICE, HTTP_PATH, NAME, NAMESPACE
from extproc.api.tracing import parse_otlp
from extproc.api.untrusted_files import open_regular_file
from extproc.engines.dialects import TRITON_BACKEND, engine_with_metric
from extproc.logs import add_log_options, log_arguments, start_logging

if TYPE_CHECKING:
    from controller.gateway.compile.file_discovery import FileDiscoverySettings
    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.cluster_access import ClusterAccess
    from extproc.api.picker_config import EndpointPickerConfig, PickerConfigChecker

log = logging.getLogger(__name__)

# Of extproc: the Redis by which processes share what they know, with its password.
REDIS_VARIABLE: Final = "ATTACHE_REDIS"
POOL_GROUPS: Final = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
_HIGHEST_PORT: Final = 65_535
# As Go's client takes it; names in a compose file may have underscores.
_REDIS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z_.-]+):[0-9]{1,5}")
_DATABASE: Final = re.compile("[0-9]{1,4}")
_MOST_SECRET_BYTES: Final = 64 * 1024
_SELECTED: Final = "selected-endpoints"
_METRIC_FLAGS: Final = (
    "total-queued-requests-metric",
    "total-running-requests-metric",
    "kv-cache-usage-percentage-metric",
)
DESCRIPTION: Final = (
    "Serve one InferencePool as an endpoint picker of the Gateway API Inference Extension. The flags are those of"
    " llm-d's endpoint picker, so that its image can be replaced by this one. With file-discovery in the"
    " EndpointPickerConfig it needs no cluster."
)
# OpenTelemetry's variables, the more specific ones first.
_COLLECTORS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSECURE: Final = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
_LOCAL_COLLECTOR: Final = "http://localhost:4317"
_GRPC: Final[Mapping[str, str]] = MappingProxyType({"http": "grpc", "https": "grpcs"})
_NO_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "OTEL_EXPORTER_OTLP_HEADERS": "collectors get no headers; let the gateway's own collector add them",
        "OTEL_TRACES_SAMPLER": "the gateway decides which requests are sampled",
    }
)
_ROLE_RETRY_S: Final = 1.0
# Of extproc's pages, where they are guarded.
_SOCKET: Final = "pages.sock"
_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - a pod's ports are for others


class EppPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``pool``: ``namespace/name``. ``fixed_pool``: the pool itself, where it is no object of the cluster.
    ``server_fields``: of the pool's ModelServer. ``picker_file`` or ``picker_text``: the EndpointPickerConfig, if one
    is given. ``extproc``: its options, without ``--config``. ``metrics``: where the role's metrics are.
    ``guarded_pages``: where extproc's pages are, for those who may get them; empty: extproc serves them to all.
    ``has_cluster``: the pool's pods are its endpoints; without one a file lists them. ``environment``: of extproc.
    ``notes``: a line for each variable that has no effect.
    """

    pool: str
    group: str
    fixed_pool: Mapping[str, Any] | None
    server_fields: Mapping[str, Any]
    picker_file: Path | None
    picker_text: str
    extproc: tuple[str, ...]
    metrics: str
    guarded_pages: str = ""
    kubeconfig: str = ""
    has_cluster: bool = True
    environment: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is not in llm-d's flags. ``namespace``: ours, empty if unknown. ``address``: where ports are opened.
    ``has_cluster``: as in EppPlan. ``fields``: of the pool's ModelServer, beside those that follow from flags.
    ``redis``: the URL of a Redis by which replicas share what they know; empty: they do not. ``options``: further ones
    of extproc. ``variables``: of the environment; those of OpenTelemetry are used.
    """

    namespace: str = ""
    address: str
    trusts_headers: bool = True
    has_cluster: bool = True
    fields: Mapping[str, Any] = {}
    redis: str = ""
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}


def plan_launch(given: EppFlags, context: LaunchContext) -> EppPlan:
    """Raises FlagInvalid."""
    values, address = given.values, context.address
    selector, name = values.get("endpoint-selector", ""), values.get("pool-name", "")
    if not context.has_cluster:
        # as in llm-d, where the name is any text, and may be left out
        selector, name = "", pool_name(name)
    elif bool(selector) == bool(name):
        raise FlagInvalid("write --pool-name or --endpoint-selector")
    if "config-file" in values and "config-text" in values:
        raise FlagInvalid("--config-file and --config-text: write one of them")
    group = values["pool-group"]
    if group not in POOL_GROUPS:
        raise FlagInvalid(f"--pool-group={group}: write {' or '.join(POOL_GROUPS)}")
    namespace = values.get("pool-namespace") or context.namespace or "default"
    for flag, given_name, pattern in (("pool-name", name, NAME), ("pool-namespace", namespace, NAMESPACE)):
        if given_name and re.match(pattern, given_name) is None:
            raise FlagInvalid(f"--{flag}={given_name} {ADVICE[pattern]}")
    fixed = None
    if selector:
        name = _SELECTED
        fixed = _fixed_pool(namespace, selector, values.get("endpoint-target-ports", ""))
    pool = f"{namespace}/{name}"
    file = values.get("config-file")
    # extproc's own pages are beside the role's
    metrics_port = _port(values, "metrics-port", _HIGHEST_PORT - 1)
    pages = join_host_port(address, metrics_port)
    is_guarded = _guards_metrics(values, has_cluster=context.has_cluster)
    collector, notes = parse_otlp_variables(context.variables) if is_true(values["tracing"]) else ("", ())
    return EppPlan(
        pool=pool,
        group=group,
        fixed_pool=fixed,
        server_fields={
            "scrapeInterval": _duration(values, "refresh-metrics-interval"),
            **_metrics_page(values),
            **_engine(values),
            **context.fields,
        },
        picker_file=None if file is None else Path(file),
        picker_text=values.get("config-text", ""),
        extproc=(
            *_extproc(values, pool, address),
            *(() if is_guarded else ("--metrics", pages)),
            # the directory is made by us: names of files are those of the operator's own files
            *("--files", str(Path.cwd() if file is None else Path(file).absolute().parent)),
            *(("--trust-headers",) if context.trusts_headers else ()),
            *(("--redis-channel", f"attache.{pool}") if context.redis else ()),
            *tls_options(values),
            *(("--otlp", collector) if collector else ()),
            *context.options,
        ),
        metrics=join_host_port(address, metrics_port + 1),
        guarded_pages=pages if is_guarded else "",
        kubeconfig=values.get("kubeconfig", ""),
        has_cluster=context.has_cluster,
        environment={REDIS_VARIABLE: context.redis} if context.redis else {},
        notes=notes,
    )


def parse_otlp_variables(variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The collector's URL for extproc, empty: none; and what of OpenTelemetry's variables has no effect.

    As in llm-d, spans go by gRPC, and a mistake costs only the traces.
    """
    endpoint = next(filter(None, map(variables.get, _COLLECTORS)), "")
    exporter = variables.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "")
    if not exporter:
        return "", ()
    if exporter != "otlp":
        return "", (f"no spans are sent: OTEL_TRACES_EXPORTER is {exporter}; write otlp",)
    scheme, separator, address = (endpoint or _LOCAL_COLLECTOR).rpartition("://")
    if not separator:
        is_plain = any(variables.get(name, "").lower() == "true" for name in _INSECURE)
        scheme = "http" if is_plain else "https"
    url = f"{_GRPC.get(scheme, scheme)}://{address.removesuffix('/')}"
    try:
        parse_otlp(url)
    except ValueError as error:
        return "", (f"no spans are sent: {error}",)
    return url, tuple(f"{name} has no effect: {why}" for name, why in _NO_EFFECT.items() if variables.get(name))


def conformance_plan(planned: EppPlan) -> EppPlan:
    """The same for the conformance suite, whose only plugin picks the endpoint that a header names: extproc does so on
    request.
    """
    return msgspec.structs.replace(
        planned, picker_file=None, picker_text="", extproc=(*planned.extproc, "--conformance")
    )


def _extproc(values: Mapping[str, str], pool: str, address: str) -> tuple[str, ...]:
    words = ["--pool", pool, "--wait-for-pool", "--settle", "0s", "--llm-d-metrics"]
    for option, flag in (("--listen", "grpc-port"), ("--health", "grpc-health-port")):
        words += [option, join_host_port(address, _port(values, flag))]
    words += ["--drain", _duration(values, "drain-timeout")]
    if is_true(values["emit-endpoint-scores"]):
        words.append("--endpoint-scores")
    if is_true(values["secure-serving"]):
        folder = values.get("cert-path")
        pair = ("--tls-cert", f"{folder}/tls.crt", "--tls-key", f"{folder}/tls.key")
        words += pair if folder else ("--tls-self-signed",)
    return tuple(words)


def _guards_metrics(values: Mapping[str, str], *, has_cluster: bool) -> bool:
    """As llm-d's picker, which has no such guard without a cluster. Raises FlagInvalid."""
    given = values.get("metrics-endpoint-auth")
    if given is not None and is_true(given) and not has_cluster:
        raise FlagInvalid(
            "--metrics-endpoint-auth: without a cluster nobody can check tokens; write --metrics-endpoint-auth=false,"
            f" and limit by a firewall who reaches port {values['metrics-port']} and the next one"
        )
    return has_cluster and (given is None or is_true(given))


def _port(values: Mapping[str, str], flag: str, highest: int = _HIGHEST_PORT) -> int:
    port = int(values[flag])
    if not 1 <= port <= highest:
        raise FlagInvalid(f"--{flag}={port}: write a port from 1 to {highest}")
    return port


def _duration(values: Mapping[str, str], flag: str) -> str:
    try:
        Duration(values[flag])
    except ValueError:
        raise FlagInvalid(f"--{flag}={values[flag]}: write a duration such as 200ms or 1m30s") from None
    return values[flag]


def _metrics_page(values: Mapping[str, str]) -> dict[str, Any]:
    """Where the engines' metrics are, as fields of the ModelServer."""
    fields: dict[str, Any] = _metrics_path(values)
    port, scheme = values["model-server-metrics-port"], values["model-server-metrics-scheme"]
    if port != "0":
        fields["metricsPort"] = _port(values, "model-server-metrics-port")
    if scheme == "https":
        if not is_true(values["model-server-metrics-https-insecure-skip-verify"]):
            raise FlagInvalid(
                "--model-server-metrics-https-insecure-skip-verify=false: write a metrics-data-source with scheme:"
                " https, insecureSkipVerify: false and caCertPath into the EndpointPickerConfig"
            )
        fields["connection"] = {"tls": {"insecureSkipVerify": True}}
    elif scheme != "http":
        raise FlagInvalid(f"--model-server-metrics-scheme={scheme}: write http or https")
    return fields


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
            engine = engine_with_metric(metric)
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


def parser(prog: str = "attache epp") -> argparse.ArgumentParser:
    """The options, for --help and completion; ``read_flags`` reads them."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=(
            "Exit status: 0 after SIGTERM or SIGINT, 1 if extproc ended unexpectedly, 2 for a mistake in the flags or "
            "no cluster and no file of endpoints. docs/reference/llm-d-flags.md lists flags that have no effect."
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
            "trust headers that identify the caller, as llm-d does; the gateway must then write them (default: "
            "%(default)s)"
        ),
    )
    made.add_argument(
        "--redis",
        metavar="URL",
        default="",
        help=(
            "share load, cached prefixes and sessions of replicas through redis://HOST:PORT (default:"
            f" ${REDIS_VARIABLE}, or the redis-syncer of the EndpointPickerConfig)"
        ),
    )
    made.add_argument(
        "--shadow",
        action="store_true",
        help="compare the picks of llm-d's own picker with ours, and decide nothing; the gateway sends copies "
        "(observability_mode)",
    )
    made.add_argument(
        "--model-server",
        metavar="YAML",
        default="",
        help=f"fields of the pool's ModelServer, such as 'engine: SGLang'; the annotation {SETTINGS} has precedence",
    )
    made.add_argument(
        "--conformance",
        action="store_true",
        help="only for the conformance suite: obey the header test-epp-endpoint-selection, and read no plugins",
    )
    add_log_options(made)


def main(words: list[str], prog: str, check_picker: PickerConfigChecker) -> int:
    """Exit status: 0 after a signal, 1 if extproc ended unexpectedly, 2 for a mistake in the flags.

    ``check_picker``: that of extproc.
    """
    if {"--help", "-h"} & set(words):
        parser(prog).parse_args(["--help"])
    ours = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    _add_own(ours)
    options, theirs = ours.parse_known_args(words)
    start_logging(options)
    try:
        given = read_flags(theirs)
        problem, config = _config(given)
        discovery = None if config is None else _discovery(given, config)
        context = LaunchContext(
            namespace=os.environ.get("NAMESPACE", ""),
            address=options.bind_address,
            trusts_headers=options.trust_headers == "true",
            has_cluster=discovery is None,
            fields=_fields(options.model_server),
            variables=os.environ,
            redis=options.redis or os.environ.get(REDIS_VARIABLE, "") or _redis(config),
            options=(*(("--shadow",) if options.shadow else ()), *log_arguments(options)),
        )
        planned = plan_launch(given, context)
        if options.conformance:
            planned = conformance_plan(planned)
        access = _access(planned, problem) if planned.has_cluster else None
    except FlagInvalid as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    for note in (*given.notes, *planned.notes):
        log.info("%s", note)
    if discovery is not None:
        log.info("no cluster is followed: %s lists the endpoints of %s", discovery.path, planned.pool)
    with tempfile.TemporaryDirectory(prefix="attache-epp-") as folder:
        return asyncio.run(_run(planned, access, Path(folder), check_picker))


def _config(given: EppFlags) -> tuple[str, EndpointPickerConfig | None]:
    """The EndpointPickerConfig, None if there is none that can be read; and why it cannot be, empty if it can.

    One that cannot be read may be mended while the cluster is followed.
    """
    file, text = given.values.get("config-file", ""), given.values.get("config-text", "")
    if not file and not text:
        return "", None
    try:
        return "", read_picker_file(file or "--config-text", text or Path(file).read_text()).config
    except (OSError, UnicodeDecodeError) as error:
        return f"{file}: {error}", None
    except ConfigInvalid as error:
        return "\n".join(map(str, error.mistakes)), None


def _discovery(given: EppFlags, config: EndpointPickerConfig) -> FileDiscoverySettings | None:
    """How endpoints are found without a cluster, None if the file does not say so. Raises FlagInvalid."""
    try:
        return parse_file_discovery(config)
    except DiscoveryInvalid as error:
        raise FlagInvalid(f"{given.values.get('config-file', '--config-text')}: {error}") from None


def _redis(config: EndpointPickerConfig | None) -> str:
    """The URL of the file's redis-syncer, empty if it has none. Raises FlagInvalid."""
    plugin = None if config is None else next((one for one in config.plugins if one.type == "redis-syncer"), None)
    if plugin is None:
        return ""
    given = plugin.parameters or {}
    address, variable, file = (str(given.get(key) or "") for key in ("address", "passwordEnv", "passwordFile"))
    database = str(given.get("db") or 0)
    if _REDIS.fullmatch(address) is None or int(address.rpartition(":")[2]) > _HIGHEST_PORT:
        raise FlagInvalid(
            f"{plugin.effective_name}: the parameter 'address' is missing or wrong; write HOST:PORT of the Redis"
        )
    if _DATABASE.fullmatch(database) is None:
        raise FlagInvalid(f"{plugin.effective_name}: the parameter 'db' is no number of a database; write 0, 1 or more")
    try:
        password = _content(file).strip() if file else os.environ[variable] if variable else ""
    except (OSError, UnicodeDecodeError) as error:
        raise FlagInvalid(f"{plugin.effective_name}: passwordFile: {error}") from None
    except KeyError:
        raise FlagInvalid(f"{plugin.effective_name}: passwordEnv: the variable {variable} is not set; set it") from None
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{secret}{address}/{database}"


def _content(file: str) -> str:
    with open_regular_file(file) as opened:
        return opened.read(_MOST_SECRET_BYTES).decode()


def _fields(text: str) -> Mapping[str, Any]:
    """Of ``--model-server``; raises FlagInvalid."""
    found = parse_pool_settings(text, "--model-server")
    if isinstance(found, str):
        raise FlagInvalid(found)
    return found


def _access(planned: EppPlan, problem: str) -> ClusterAccess:
    """``problem``: why the EndpointPickerConfig cannot be read, which might do without a cluster. Raises
    FlagInvalid.
    """
    # the client takes a third of a second to import: not for --help
    from controller.kube.cluster_access import access_from_kubeconfig, find_access  # noqa: PLC0415
    from controller.kube.errors import ClusterAccessInvalid  # noqa: PLC0415

    try:
        return access_from_kubeconfig(Path(planned.kubeconfig)) if planned.kubeconfig else find_access()
    except ClusterAccessInvalid as error:
        advice = "; or name a file of endpoints in the EndpointPickerConfig (dataLayer.discovery with file-discovery)"
        raise FlagInvalid(f"{error}{advice}" + (f"\n{problem}" if problem else "")) from None


async def _run(planned: EppPlan, access: ClusterAccess | None, folder: Path, check_picker: PickerConfigChecker) -> int:
    """extproc as a process of its own, so that following the cluster costs requests nothing; and the role, here."""
    config = folder / "config"
    config.mkdir()
    words = [sys.executable, "-m", "attache", "extproc", "--config", str(config), *planned.extproc]
    if planned.guarded_pages:
        words += ["--metrics", f"unix:{folder / _SOCKET}"]
    extproc = await asyncio.create_subprocess_exec(*words, env={**os.environ, **planned.environment})
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


async def _follow(
    planned: EppPlan, access: ClusterAccess | None, folder: Path, check_picker: PickerConfigChecker
) -> None:
    """The role, until cancelled. Requests go on without it, so a failure of it is logged, and it begins again."""
    while True:
        try:
            await _run_role(planned, access, folder, check_picker)
        except OSError as error:
            log.error("the picker role cannot listen or write, tried again in %g s: %s", _ROLE_RETRY_S, error)
        except Exception:
            log.exception("the picker role failed, and begins again in %g s; please report this", _ROLE_RETRY_S)
        await asyncio.sleep(_ROLE_RETRY_S)


async def _run_role(
    planned: EppPlan, access: ClusterAccess | None, folder: Path, check_picker: PickerConfigChecker
) -> None:
    from controller.gateway.inference_pool_reconciler import FilePoolRunner, FilePoolSettings  # noqa: PLC0415 - not for --help
    from controller.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from controller.kube.metrics_and_health import serve_pages  # noqa: PLC0415

    metrics = GatewayMetrics()
    if access is not None:
        await _run_in_cluster(planned, access, folder, check_picker, metrics)
        return
    settings = FilePoolSettings(
        config=folder / "config",
        pool=planned.pool,
        picker_file=planned.picker_file,
        picker_text=planned.picker_text,
        server_fields=planned.server_fields,
    )
    role = FilePoolRunner(settings, metrics, check_picker=check_picker)
    async with serve_pages(planned.metrics, metrics.registry, role.ready.is_set):
        await role.run()


async def _run_in_cluster(
    planned: EppPlan, access: ClusterAccess, folder: Path, check_picker: PickerConfigChecker, metrics: GatewayMetrics
) -> None:
    from controller.gateway.inference_pool_reconciler import CONTROLLER, InferencePoolRunner, InferencePoolSettings  # noqa: PLC0415
    from controller.kube.authorizer import RequestAuthorizer, authorization_middleware  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415 - not for --help
    from controller.kube.metrics_and_health import serve_pages, serve_relayed_pages  # noqa: PLC0415

    file = planned.picker_file
    if planned.picker_text:
        file = folder / "picker.yaml"
        await asyncio.to_thread(file.write_text, planned.picker_text)
    settings = InferencePoolSettings(
        config=folder / "config",
        pool=planned.pool,
        group=planned.group,
        picker_file=file,
        # llm-d's service account may read none
        reads_config_maps=False,
        fixed_pool=planned.fixed_pool,
        server_fields=planned.server_fields,
    )
    async with connect(access, manager=CONTROLLER) as client:
        role = InferencePoolRunner(client, settings, metrics, check_picker=check_picker)
        guard = None
        async with contextlib.AsyncExitStack() as served:
            if planned.guarded_pages:
                guard = authorization_middleware(RequestAuthorizer(client, asyncio.get_running_loop().time))
                await served.enter_async_context(serve_relayed_pages(planned.guarded_pages, folder / _SOCKET, guard))
            await served.enter_async_context(
                serve_pages(planned.metrics, metrics.registry, role.ready.is_set, guard=guard)
            )
            await role.run()
