# SPDX-License-Identifier: Apache-2.0
"""From llm-d's flags to what runs: the role's pool, and the command line of extproc."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.commands.epp_flags import FlagInvalid, is_true
from controller.gateway.compile.pools import KIND
from extproc.api.patterns import ADVICE, HTTP_PATH
from extproc.api.quantities import Duration
from extproc.engines.dialects import TRITON_BACKEND, engine_of

if TYPE_CHECKING:
    from controller.commands.epp_flags import Given

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
