# SPDX-License-Identifier: Apache-2.0
"""Classes of KEDA's external scaler messages, in protobuf's C implementation.

They are described here, field by field, as KEDA's ``externalscaler.proto`` has them, and live in a pool of their own.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

SERVICE: Final = "externalscaler.ExternalScaler"
_FILE: Final = "externalscaler.proto"
_PACKAGE: Final = "externalscaler"
_REPEATED: Final = FieldDescriptorProto.LABEL_REPEATED
_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}
# A message's fields: number, name and type; "repeated" stands before the type, "map" is of strings to strings.
_MESSAGES: Final[dict[str, tuple[tuple[int, str, str], ...]]] = {
    "ScaledObjectRef": ((1, "name", "string"), (2, "namespace", "string"), (3, "scalerMetadata", "map")),
    "IsActiveResponse": ((1, "result", "bool"),),
    "MetricSpec": ((1, "metricName", "string"), (2, "targetSize", "int64"), (3, "targetSizeFloat", "double")),
    "GetMetricSpecResponse": ((1, "metricSpecs", "repeated MetricSpec"),),
    "GetMetricsRequest": ((1, "scaledObjectRef", "ScaledObjectRef"), (2, "metricName", "string")),
    "MetricValue": ((1, "metricName", "string"), (2, "metricValue", "int64"), (3, "metricValueFloat", "double")),
    "GetMetricsResponse": ((1, "metricValues", "repeated MetricValue"),),
}


def _described() -> FileDescriptorProto:
    file = FileDescriptorProto(name=_FILE, package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add(message, number, field, kind)
    return file


def _add(message: DescriptorProto, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    # JSON has the same names
    field.json_name = name
    if kind == "map":
        # a map is a repeated entry of key and value
        entry = message.nested_type.add(name=f"{name[0].upper()}{name[1:]}Entry")
        entry.options.map_entry = True
        _add(entry, 1, "key", "string")
        _add(entry, 2, "value", "string")
        kind = f"repeated {message.name}.{entry.name}"
    if kind.startswith("repeated "):
        field.label = _REPEATED
        kind = kind.removeprefix("repeated ")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _new_pool() -> DescriptorPool:
    pool = DescriptorPool()
    pool.Add(_described())
    return pool


_classes: Final = GetMessageClassesForFiles([_FILE], _new_pool())
ScaledObjectRef = _classes[f"{_PACKAGE}.ScaledObjectRef"]
IsActiveResponse = _classes[f"{_PACKAGE}.IsActiveResponse"]
MetricSpec = _classes[f"{_PACKAGE}.MetricSpec"]
GetMetricSpecResponse = _classes[f"{_PACKAGE}.GetMetricSpecResponse"]
GetMetricsRequest = _classes[f"{_PACKAGE}.GetMetricsRequest"]
MetricValue = _classes[f"{_PACKAGE}.MetricValue"]
GetMetricsResponse = _classes[f"{_PACKAGE}.GetMetricsResponse"]
