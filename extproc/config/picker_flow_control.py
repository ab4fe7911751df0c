# SPDX-License-Identifier: Apache-2.0
"""The flow control section of llm-d's EndpointPickerConfig as our FlowControl."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from extproc.config.admission import Band, FlowControl, SaturationSpec
from extproc.config.picker_config import BandSection, DetectorSection, EndpointPickerConfig, FlowControlSection
from extproc.config.quantities import ByteSize, Duration
from extproc.config.schema import check_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.config.admission import Fairness, Order
    from extproc.config.errors import Finding
    from extproc.config.picker_config import PluginSpec

FEATURE_GATE: Final = "flowControl"
_LOWEST: Final = -(2**31)
# A wait without an end there ends here all the same: Envoy waits for an hour at most.
_NO_TIMEOUT: Final = Duration("59m")

# Least service within the last minute stands for llm-d's service with a half-life of one.
FAIRNESS: Final[Mapping[str, Fairness]] = MappingProxyType(
    {
        "round-robin-fairness-policy": "RoundRobin",
        "global-strict-fairness-policy": "GlobalStrict",
        "program-aware-fairness-policy": "SlidingWindow",
    }
)
ORDERS: Final[Mapping[str, Order]] = MappingProxyType(
    {
        "fcfs-ordering-policy": "FirstCome",
        "edf-ordering-policy": "Deadline",
        "slo-deadline-ordering-policy": "Deadline",
    }
)


class UtilizationParameters(msgspec.Struct, frozen=True, rename="camel"):
    """Of ``utilization-detector``: engines are full by what they report."""

    queue_depth_threshold: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0


class ConcurrencyParameters(msgspec.Struct, frozen=True, rename="camel"):
    """Of ``concurrency-detector``: engines are full by what was sent to them."""

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 1_000_000
    headroom: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0


def check_flow_control_section(config: EndpointPickerConfig) -> Iterator[Finding]:
    """The parameters of the saturation detector have the right shape."""
    plugins = _Plugins(config)
    if not plugins.has_flow_control:
        return
    index, plugin = plugins.detector
    if plugin is not None and plugin.parameters:
        for place, message in check_shape(plugin.parameters, plugins.detector_parameters):
            yield ("plugins", index, "parameters", *place), message


def flow_control_of(config: EndpointPickerConfig) -> FlowControl | None:
    """None without the feature gate. Expects a config in which ``check_flow_control_section`` finds nothing."""
    plugins = _Plugins(config)
    if not plugins.has_flow_control:
        return None
    section = config.flow_control or FlowControlSection()
    usual = section.default_priority_band or BandSection()
    negative = section.default_negative_priority_band or usual
    named = {band.priority: band for band in section.priority_bands}
    bands = {_LOWEST: negative, 0: usual, **named}
    ttl = section.default_request_ttl
    return FlowControl(
        saturation=_saturation(plugins),
        timeout=_bounded(ttl),
        no_endpoint_timeout=_bounded(
            ttl if section.no_endpoint_request_ttl is None else section.no_endpoint_request_ttl
        ),
        # there, bands are bounded, and all together only if that is said
        max_requests=section.max_requests or 1_000_000,
        max_bytes=section.max_bytes or ByteSize("64Gi"),
        bands=tuple(_band(priority, band, plugins) for priority, band in bands.items()),
        sharing="Strict",
        flow_by="Tenant",
    )


def _bounded(ttl: Duration | None) -> Duration:
    return min(ttl or _NO_TIMEOUT, _NO_TIMEOUT)


class _Plugins:
    """Plugins by the names that references use; a name that no plugin has is a type with its defaults."""

    def __init__(self, config: EndpointPickerConfig) -> None:
        self._places = {one.called: (index, one) for index, one in enumerate(config.plugins)}
        self.has_flow_control = FEATURE_GATE in config.feature_gates
        section = config.flow_control
        self._detector = (section and section.saturation_detector) or DetectorSection()

    def type_of(self, name: str) -> str:
        """The type of the plugin called ``name``."""
        return self._places[name][1].type if name in self._places else name

    @property
    def detector(self) -> tuple[int, PluginSpec | None]:
        """The plugin that says how full engines are, and its place among all."""
        return self._places.get(self._detector.plugin_ref, (-1, None))

    @property
    def detector_parameters(self) -> type[UtilizationParameters | ConcurrencyParameters]:
        """What that plugin takes."""
        is_concurrency = self.type_of(self._detector.plugin_ref) == "concurrency-detector"
        return ConcurrencyParameters if is_concurrency else UtilizationParameters


def _band(priority: int, band: BandSection, plugins: _Plugins) -> Band:
    name = band.priority_name.lower() or ("negative" if priority == _LOWEST else f"priority-{priority}")
    return Band(
        name=name,
        priority=priority,
        share=1.0,
        max_requests=band.max_requests or 5000,
        max_bytes=band.max_bytes or ByteSize("1Gi"),
        fairness=FAIRNESS.get(plugins.type_of(band.fairness_policy_ref), "GlobalStrict"),
        order=ORDERS.get(plugins.type_of(band.ordering_policy_ref), "FirstCome"),
    )


def _saturation(plugins: _Plugins) -> SaturationSpec:
    _, plugin = plugins.detector
    given = (plugin and plugin.parameters) or {}
    parameters = msgspec.convert(given, plugins.detector_parameters)
    if isinstance(parameters, ConcurrencyParameters):
        mode = parameters.concurrency_mode
        return SaturationSpec(
            queue_depth=None,
            kv_usage=None,
            max_wait=None,
            max_requests=parameters.max_concurrency if mode != "tokens" else None,
            max_tokens=parameters.max_token_concurrency if mode != "requests" else None,
            headroom=parameters.headroom,
        )
    return SaturationSpec(
        queue_depth=max(1, round(parameters.queue_depth_threshold)),
        kv_usage=parameters.kv_cache_util_threshold,
        max_wait=None,
        headroom=parameters.headroom,
    )
