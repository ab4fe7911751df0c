# SPDX-License-Identifier: Apache-2.0
"""EndpointPickerConfig, as llm-d and the Gateway API Inference Extension write it.

Source: llm-d-router ``pkg/epp/config``. ``plugins`` name types and parameters; ``schedulingProfiles`` refer to them
with weights. ``extproc.scheduling`` defines the types and their parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

import msgspec

from extproc.api.admission import FlowControl
from extproc.api.config_errors import ConfigInvalid
from extproc.api.quantities import Duration, Quantity
from extproc.api.yaml_documents import Document

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Path

PICKER_KIND = "EndpointPickerConfig"
# Parameters of llm-d's metrics-data-source that name files of the machine.
_FILES: Final = ("caCertPath", "clientCertPath", "clientKeyPath")


class _Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """camelCase, unknown fields refused."""


class PluginSpec(_Section, frozen=True):
    """One plugin; its name is its type's where it has none of its own."""

    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def effective_name(self) -> str:
        """How profiles refer to it."""
        return self.name or self.type


class PluginRef(_Section, frozen=True):
    """A plugin in a profile; the weight is a scorer's."""

    plugin_ref: str
    # sums of weighted scores stay finite
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None


class ProfileSpec(_Section, frozen=True):
    """A profile: plugins in the order in which they run."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    plugins: tuple[PluginRef, ...]


class BandSection(_Section, frozen=True):
    """One of ``priorityBands``, or what holds for all others. A quantity of 0 is the band's default, as if it were
    absent.
    """

    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 0
    priority_name: str = ""
    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""
    default_request_ttl: Duration | None = msgspec.field(default=None, name="defaultRequestTTL")


class DetectorSection(_Section, frozen=True):
    """The plugin that measures how full engines are."""

    plugin_ref: str = ""


class LegacyDetectorSection(_Section, frozen=True):
    """The top-level ``saturationDetector``: names a plugin, or has the parameters of ``utilization-detector`` itself.

    The parameters are those of the Gateway API Inference Extension up to its release 1.3.
    """

    plugin_ref: str = ""
    queue_depth_threshold: Annotated[float, msgspec.Meta(gt=0)] | None = None
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    metrics_staleness_threshold: Duration | None = None


class FlowControlSection(_Section, frozen=True):
    """``flowControl``. Eviction of running requests is read and not used. A quantity of 0 is no limit."""

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: Duration = msgspec.field(default=Duration("60s"), name="defaultRequestTTL")
    no_endpoint_request_ttl: Duration | None = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: BandSection | None = None
    default_negative_priority_band: BandSection | None = None
    priority_bands: tuple[BandSection, ...] = ()
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: DetectorSection | None = None
    enable_eviction: bool = False


class EndpointPickerConfig(_Section, frozen=True):
    """The document. The fields of type ``Any`` are configured elsewhere here: read, and not used."""

    api_version: Literal["llm-d.ai/v1alpha1", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    metadata: Any = None
    plugins: tuple[PluginSpec, ...] = ()
    scheduling_profiles: tuple[ProfileSpec, ...] = ()
    feature_gates: tuple[str, ...] = ()
    data_layer: Any = None
    data: Any = None
    flow_control: FlowControlSection | None = None
    request_handler: Any = None
    saturation_detector: LegacyDetectorSection | None = None
    parser: Any = None


class PickerFile(msgspec.Struct, frozen=True):
    """An EndpointPickerConfig of the configuration directory. ``flow_control``: what its section means here."""

    document: Document
    config: EndpointPickerConfig
    flow_control: FlowControl | None = None

    def referenced_files(self) -> Iterator[tuple[Path, str]]:
        """Files that its plugins read: where each is named, and its name."""
        for index, spec in enumerate(self.config.plugins):
            if spec.type == "metrics-data-source":
                given = spec.parameters or {}
                yield from (
                    (("plugins", index, "parameters", one), str(given[one])) for one in _FILES if given.get(one)
                )


def reject_file_references(file: PickerFile) -> None:
    """For objects of a cluster, whose authors have no rights on the gateway's machine; raises ConfigInvalid."""
    message = "names a file of the gateway, which objects of a cluster may not; leave it out"
    mistakes = file.document.locate_mistakes([(path, message) for path, _ in file.referenced_files()])
    if mistakes:
        raise ConfigInvalid(mistakes)


class PickerConfigChecker(Protocol):
    """Whether an EndpointPickerConfig can be used with the installed plugins, which ``extproc.scheduling`` lists."""

    def __call__(self, file: PickerFile) -> Sequence[str]:
        """A sentence for each field that has no effect here; raises ConfigInvalid with every mistake."""
        ...


def accept_any_plugins(file: PickerFile) -> Sequence[str]:  # noqa: ARG001 - as the protocol has it
    """A PickerConfigChecker without plugins to compare with: every config that could be read is accepted."""
    return ()
