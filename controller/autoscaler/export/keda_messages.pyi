# SPDX-License-Identifier: Apache-2.0
# Types of the classes that messages.py makes, so that mypy finds a misspelt field.
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer, ScalarMap
from google.protobuf.message import Message

SERVICE: Final = "externalscaler.ExternalScaler"

class ScaledObjectRef(Message):
    name: str
    namespace: str
    @property
    def scalerMetadata(self) -> ScalarMap[str, str]: ...
    def __init__(
        self, *, name: str = ..., namespace: str = ..., scalerMetadata: Mapping[str, str] | None = ...
    ) -> None: ...

class IsActiveResponse(Message):
    result: bool
    def __init__(self, *, result: bool = ...) -> None: ...

class MetricSpec(Message):
    metricName: str
    targetSize: int
    targetSizeFloat: float
    def __init__(self, *, metricName: str = ..., targetSize: int = ..., targetSizeFloat: float = ...) -> None: ...

class GetMetricSpecResponse(Message):
    @property
    def metricSpecs(self) -> RepeatedCompositeFieldContainer[MetricSpec]: ...
    def __init__(self, *, metricSpecs: Iterable[MetricSpec] | None = ...) -> None: ...

class GetMetricsRequest(Message):
    metricName: str
    @property
    def scaledObjectRef(self) -> ScaledObjectRef: ...
    def __init__(self, *, scaledObjectRef: ScaledObjectRef | None = ..., metricName: str = ...) -> None: ...

class MetricValue(Message):
    metricName: str
    metricValue: int
    metricValueFloat: float
    def __init__(self, *, metricName: str = ..., metricValue: int = ..., metricValueFloat: float = ...) -> None: ...

class GetMetricsResponse(Message):
    @property
    def metricValues(self) -> RepeatedCompositeFieldContainer[MetricValue]: ...
    def __init__(self, *, metricValues: Iterable[MetricValue] | None = ...) -> None: ...
