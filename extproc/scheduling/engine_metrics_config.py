# SPDX-License-Identifier: Apache-2.0
"""Where engines' metrics pages are, and what the metrics on them are called: by ModelServer, file and endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal
from urllib.parse import quote

import msgspec

from extproc.api import spec as patterns
from extproc.api.engine_connection import CertificateFiles, EngineConnection, EngineTls
from extproc.api.quantities import Duration
from extproc.api.spec import Port
from extproc.engines.dialects import DIALECTS, ENGINE_LABELS, ENGINE_TYPES, FAMILIES, Dialect, parse_metric_name
from extproc.wire_names import MODELS_PATH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.model_server import ModelServerSpec

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
# An engine of which nothing but what is configured is read.
_UNKNOWN: Final = msgspec.structs.replace(
    DIALECTS["OpenAI"], sources=MappingProxyType(dict.fromkeys((one.name for one in FAMILIES), ()))
)


class CustomMetric(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A metric of engines that is an attribute of endpoints. ``metricSpec``: ``name`` or ``name{label=value,...}``."""

    attribute_key: NonEmpty
    metric_spec: NonEmpty
    # accepted without effect: no metric has to be there
    optional: bool = False


class EngineTypeMetrics(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What the metrics of one type of engine are called, each as ``name`` or ``name{label=value}``.

    What is left out is called as in the engine of that ``name``, if that is known. ``customMetrics`` are read of every
    engine.
    """

    name: str = ""
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = msgspec.field(default="", name="loraSpec")
    cache_info_spec: str = ""
    cache_block_size_label_name: str = ""
    cache_num_blocks_label_name: str = ""
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: tuple[CustomMetric, ...] = ()

    @property
    def dialect(self) -> Dialect:
        """The names by which the metrics of such an engine are read."""
        known = ENGINE_TYPES.get(self.name)
        base = _UNKNOWN if known is None else known
        named = {
            "waiting_requests": self.queued_requests_spec,
            "running_requests": self.running_requests_spec,
            "kv_cache_usage_ratio": self.kv_usage_spec,
        }
        given = {family: (parse_metric_name(spec),) for family, spec in named.items() if spec}
        return msgspec.structs.replace(
            base,
            name=self.name or base.name,
            sources=MappingProxyType({**base.sources, **given}),
            lora_info=self.lora_spec or base.lora_info,
            cache_info=self.cache_info_spec or base.cache_info,
            block_label=self.cache_block_size_label_name or base.block_label,
            blocks_label=self.cache_num_blocks_label_name or base.blocks_label,
            block_size=self.cache_block_size_spec or base.block_size,
            blocks=self.cache_num_blocks_spec or base.blocks,
        )


class MetricsExtractor(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``core-metrics-extractor``: what the metrics of each type of engine are called.

    ``engineLabelKey``: the label of an endpoint that names its type, by default ``llm-d.ai/engine-type``: vllm, sglang,
    trtllm-serve, triton-tensorrt-llm, triton, or a name of ``engineConfigs``. ``defaultEngine``: the type of those
    without one; without it, the ModelServer's ``engine``. ``customMetrics`` of ``engineConfigs`` are attributes of
    endpoints, looked for on the metrics page of every engine.
    """

    engine_configs: tuple[EngineTypeMetrics, ...] = ()
    default_engine: str = ""
    engine_label_key: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError if nothing says what the default engine's metrics are called."""
        known = {*ENGINE_TYPES, *(one.name for one in self.engine_configs)}
        if self.default_engine and self.default_engine not in known:
            raise ValueError(
                f"defaultEngine: there is no engine '{self.default_engine}'; write {', '.join(sorted(known))}"
            )

    @property
    def custom_metrics(self) -> tuple[CustomMetric, ...]:
        """Of all engines."""
        return tuple(metric for engine in self.engine_configs for metric in engine.custom_metrics)


class MetricsSource(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``metrics-data-source``: where engines' metrics pages are, instead of the ModelServer's setting.

    ``scheme``: http or https. ``path`` and ``port``: of the pages; a port is that of every endpoint. ``interval``:
    between two reads. With https, ``insecureSkipVerify`` is on unless it is set to false; then ``caCertPath``, or else
    the system, has the authorities. ``clientCertPath`` and ``clientKeyPath``: a certificate that is shown.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {"families": "the few metrics that are used are searched for on the page"}
    )

    scheme: Literal["http", "https"] | None = None
    path: Annotated[str, msgspec.Meta(pattern=patterns.HTTP_PATH, max_length=1024)] | None = None
    port: Port | None = None
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: Duration | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if half of a certificate is named."""
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath go together; write both or neither")

    @property
    def connection(self) -> EngineConnection | None:
        """How the pages are reached; None: as the engines are."""
        if self.scheme is None:
            return None
        if self.scheme == "http":
            return EngineConnection()
        shown = CertificateFiles(cert_file=self.client_cert_path, key_file=self.client_key_path)
        return EngineConnection(
            tls=EngineTls(
                ca_file=None if self.insecure_skip_verify else self.ca_cert_path or None,
                client_certificate=shown if self.client_cert_path else None,
                insecure_skip_verify=self.insecure_skip_verify,
            )
        )


class EngineMetricNames(msgspec.Struct, frozen=True):
    """What endpoints' metrics are called. ``labels``: of the endpoint, the first of which names its type. ``types``:
    dialects by type. ``default``: of endpoints without one; None: that of the ModelServer's ``engine``.
    """

    labels: tuple[str, ...] = ENGINE_LABELS
    types: Mapping[str, Dialect] = ENGINE_TYPES
    default: Dialect | None = None

    def dialect_of(self, labels: Mapping[str, str], spec: ModelServerSpec) -> Dialect:
        """Of the engine at an endpoint with these ``labels``; one of an unknown type is of the default one."""
        named = next((labels[one] for one in self.labels if one in labels), "")
        return self.types.get(named) or self.default or DIALECTS[spec.engine]


USUAL_NAMES: Final = EngineMetricNames()


def merge_extractors(extractors: Iterable[MetricsExtractor]) -> EngineMetricNames:
    """What all extractors of a file come to."""
    found = tuple(extractors)
    configured = {one.name: one.dialect for extractor in found for one in extractor.engine_configs if one.name}
    types = MappingProxyType({**ENGINE_TYPES, **configured})
    keys = tuple(one.engine_label_key for one in found if one.engine_label_key)
    defaults = [types[one.default_engine] for one in found if one.default_engine]
    return EngineMetricNames(keys or ENGINE_LABELS, types, defaults[0] if defaults else None)


class ScrapeConfig(msgspec.Struct, frozen=True):
    """How the metrics of a pool's engines, or a provider's load, are read. ``port`` and ``path``: None: the endpoint's,
    and the engine's. ``connection``: towards the pages. ``names``: what the metrics are called.
    """

    interval_s: float
    port: int | None
    path: str | None
    connection: EngineConnection
    names: EngineMetricNames


def scrape_config_of(spec: ModelServerSpec, source: MetricsSource | None, names: EngineMetricNames) -> ScrapeConfig:
    """``source``, of an EndpointPickerConfig, goes before the ModelServer, which alone says whether anything is
    read.
    """
    source = source or MetricsSource()
    if spec.provider is not None:
        # as Envoy, over TLS with the authorities of the system if none are named
        tls = (spec.connection.tls or EngineTls()) if spec.uses_tls else None
        path = f"{spec.provider.path_prefix}{MODELS_PATH}/{quote(spec.model)}"
        return ScrapeConfig(
            spec.report_interval_s, None, path, msgspec.structs.replace(spec.connection, tls=tls), names
        )
    if spec.protocol != "OpenAI":
        # the metrics that are known are those of generative models
        return ScrapeConfig(0.0, spec.metrics_port, spec.metrics_path, spec.connection, names)
    interval = source.interval if source.interval and spec.scrape_interval else spec.scrape_interval
    return ScrapeConfig(
        interval_s=float(interval),
        port=source.port or spec.metrics_port,
        path=source.path or spec.metrics_path,
        connection=spec.connection if source.connection is None else source.connection,
        names=names,
    )
