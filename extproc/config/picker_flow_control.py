"""The flow control of an EndpointPickerConfig (llm-d) as ours: its bands, policies and detectors by their names there."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.config.admission import Band, FlowControl, SaturationSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.config.admission import Fairness, Order
    from extproc.config.documents import Document

FEATURE_GATE: Final = "flowControl"
_LOWEST: Final = -(2**31)
# What has no end there ends here all the same: Envoy must know how long to wait.
_NO_TIMEOUT: Final = "1h"

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


class BandSection(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One of ``priorityBands``, or what holds for all others."""

    priority: int = 0
    priority_name: str = ""
    max_bytes: Any = None
    max_requests: int | None = None
    fairness_policy_ref: str = "global-strict-fairness-policy"
    ordering_policy_ref: str = "fcfs-ordering-policy"


class DetectorSection(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which plugin says how full engines are."""

    plugin_ref: str = "utilization-detector"


class FlowControlSection(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``flowControl``. Ceilings by usage limit policies and eviction of running requests are read and not used."""

    max_bytes: Any = None
    max_requests: int | None = None
    default_request_ttl: str = msgspec.field(default="60s", name="defaultRequestTTL")
    no_endpoint_request_ttl: str | None = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: BandSection | None = None
    default_negative_priority_band: BandSection | None = None
    priority_bands: list[BandSection] = []
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: DetectorSection | None = None
    enable_eviction: bool = False


def flow_control_of(document: Document) -> FlowControl | None:
    """None where the file does not ask for any, or is not as it should be, which is said when it is read as a whole."""
    value = document.value
    if not isinstance(value, dict) or FEATURE_GATE not in (value.get("featureGates") or ()):
        return None
    try:
        section = msgspec.convert(value.get("flowControl") or {}, FlowControlSection)
        return _convert(section, _Plugins(value))
    except (msgspec.ValidationError, AttributeError, TypeError):
        return None


class _Plugins:
    """Types and parameters by the names that references use; a type that is not written down has no parameters."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._plugins = {one.get("name") or one.get("type"): one for one in value.get("plugins") or ()}

    def type_of(self, name: str) -> str:
        found: str = self._plugins.get(name, {}).get("type", name)
        return found

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        return self._plugins.get(name, {}).get("parameters") or {}


def _convert(section: FlowControlSection, plugins: _Plugins) -> FlowControl:
    usual = section.default_priority_band or BandSection()
    negative = section.default_negative_priority_band or usual
    named = {band.priority: band for band in section.priority_bands}
    bands = {_LOWEST: negative, 0: usual, **named}
    ttl = section.default_request_ttl
    return FlowControl(
        saturation=_saturation(section.saturation_detector or DetectorSection(), plugins),
        timeout=_duration(ttl),
        no_endpoint_timeout=_duration(section.no_endpoint_request_ttl or ttl),
        # there, bands are bounded, and all together only if that is said
        max_requests=section.max_requests or 1_000_000,
        max_bytes=_bytes(section.max_bytes, "64Gi"),
        bands=tuple(_band(priority, band, plugins) for priority, band in bands.items()),
        sharing="Strict",
        flow_by="Tenant",
    )


def _band(priority: int, band: BandSection, plugins: _Plugins) -> Band:
    name = band.priority_name.lower() or ("negative" if priority == _LOWEST else f"priority-{priority}")
    return Band(
        name=name,
        priority=priority,
        share=1.0,
        max_requests=band.max_requests or 5000,
        max_bytes=_bytes(band.max_bytes, "1Gi"),
        fairness=FAIRNESS.get(plugins.type_of(band.fairness_policy_ref), "GlobalStrict"),
        order=ORDERS.get(plugins.type_of(band.ordering_policy_ref), "FirstCome"),
    )


def _saturation(detector: DetectorSection, plugins: _Plugins) -> SaturationSpec:
    given = plugins.parameters_of(detector.plugin_ref)
    headroom = float(given.get("headroom", 0.0))
    if plugins.type_of(detector.plugin_ref) == "concurrency-detector":
        mode = given.get("concurrencyMode", "requests")
        return SaturationSpec(
            queue_depth=None,
            kv_usage=None,
            max_wait=None,
            max_requests=given.get("maxConcurrency", 100) if mode != "tokens" else None,
            max_tokens=given.get("maxTokenConcurrency", 1_000_000) if mode != "requests" else None,
            headroom=headroom,
        )
    return SaturationSpec(
        queue_depth=round(given.get("queueDepthThreshold", 5)),
        kv_usage=given.get("kvCacheUtilThreshold", 0.8),
        max_wait=None,
        headroom=headroom,
    )


def _duration(text: str) -> str:
    return _NO_TIMEOUT if text in {"0", "0s", "0m", "0h"} else text


def _bytes(given: Any, default: str) -> str:  # noqa: ANN401 - a number or a quantity
    return default if given is None else str(given)
