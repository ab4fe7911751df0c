# SPDX-License-Identifier: Apache-2.0
"""Our messages have the fields that Envoy has: its binary holds the descriptors that it was built from."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from extproc.streams import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_OURS: Final = Path(messages.__file__).with_name("messages.binpb")
_ROOTS: Final = {
    "ProcessingRequest": "envoy/service/ext_proc/v3/external_processor.proto",
    "ProcessingResponse": "envoy/service/ext_proc/v3/external_processor.proto",
    "StreamAccessLogsMessage": "envoy/service/accesslog/v3/als.proto",
    "StreamAccessLogsResponse": "envoy/service/accesslog/v3/als.proto",
}
# options of fields; no message that is sent uses them
_ANNOTATIONS: Final = ("envoy/annotations/", "udpa/", "validate/", "xds/annotations/")
# the last field of a serialized FileDescriptorProto: 12, syntax
_END: Final = b"b\x06proto3"


@pytest.fixture(scope="module")
def theirs(envoy: str) -> dict[str, DescriptorProto]:
    """The messages that the binary was built with, by full name."""
    found: dict[str, DescriptorProto] = {}
    seen: set[str] = set()
    waiting = list(_ROOTS.values())
    with Path(envoy).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        while waiting:
            name = waiting.pop()
            if name in seen or name.startswith(_ANNOTATIONS):
                continue
            seen.add(name)
            # the first field of a serialized FileDescriptorProto: 1, name
            start = binary.find(b"\n" + bytes([len(name)]) + name.encode())
            assert start >= 0, f"the binary has no descriptor of {name}"
            described = FileDescriptorProto.FromString(binary[start : binary.find(_END, start) + len(_END)])
            found.update(_by_name(f".{described.package}", described.message_type))
            waiting.extend(described.dependency)
    return found


@pytest.fixture(scope="module")
def ours() -> dict[str, DescriptorProto]:
    (described,) = FileDescriptorSet.FromString(_OURS.read_bytes()).file
    return dict(_by_name("", described.message_type))


def _by_name(scope: str, messages: Iterable[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        name = f"{scope}.{message.name}"
        yield name, message
        yield from _by_name(name, message.nested_type)


def _shape(field: FieldDescriptorProto) -> tuple[int, int, bool]:
    """What decides how a field is written; enums are int32 in our schema."""
    is_enum = field.type == FieldDescriptorProto.TYPE_ENUM
    kind = FieldDescriptorProto.TYPE_INT32 if is_enum else field.type
    return field.number, kind, field.label == FieldDescriptorProto.LABEL_REPEATED


def test_every_field_is_written_as_envoy_reads_it(
    ours: dict[str, DescriptorProto], theirs: dict[str, DescriptorProto]
) -> None:
    waiting = [(f".{root}", f".{file.rpartition('/')[0].replace('/', '.')}.{root}") for root, file in _ROOTS.items()]
    compared: dict[str, str] = {}
    while waiting:
        name, full_name = waiting.pop()
        if name in compared:
            assert compared[name] == full_name
            continue
        compared[name] = full_name
        fields = {field.name: field for field in theirs[full_name].field}
        for field in ours[name].field:
            assert _shape(field) == _shape(fields[field.name]), f"{full_name}.{field.name}"
            if field.type == FieldDescriptorProto.TYPE_MESSAGE:
                waiting.append((field.type_name, fields[field.name].type_name))
    assert compared.keys() == ours.keys()
