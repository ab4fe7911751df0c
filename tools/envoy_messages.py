# SPDX-License-Identifier: Apache-2.0
"""extproc's message descriptors and their static types, from the installed envoy-data-plane.

envoy-data-plane is the one source of Envoy's schema, but its betterproto2 classes parse in pure Python, 300 times
slower than the request path can bear, and take a second to import. Their metadata holds what a descriptor needs: names,
numbers, types, oneofs and maps. So every message reachable from ``ROOTS`` is described in one file, from which
protobuf's C implementation (upb) makes equivalent classes. Packages are left out, because the wire format does not
carry names, and enums become int32, so that values unknown to the schema survive.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import betterproto2
from envoy_data_plane.envoy.service.accesslog.v3 import StreamAccessLogsMessage, StreamAccessLogsResponse
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STREAMS: Final = Path(__file__).parents[1] / "extproc" / "streams"
# What Envoy and extproc send to each other.
ROOTS: Final = (ProcessingRequest, ProcessingResponse, StreamAccessLogsMessage, StreamAccessLogsResponse)
_FILE: Final = "attache/envoy_messages.proto"
_SCALARS: Final = {
    betterproto2.TYPE_BOOL: FieldDescriptorProto.TYPE_BOOL,
    betterproto2.TYPE_INT32: FieldDescriptorProto.TYPE_INT32,
    betterproto2.TYPE_INT64: FieldDescriptorProto.TYPE_INT64,
    betterproto2.TYPE_UINT32: FieldDescriptorProto.TYPE_UINT32,
    betterproto2.TYPE_UINT64: FieldDescriptorProto.TYPE_UINT64,
    betterproto2.TYPE_FLOAT: FieldDescriptorProto.TYPE_FLOAT,
    betterproto2.TYPE_DOUBLE: FieldDescriptorProto.TYPE_DOUBLE,
    betterproto2.TYPE_STRING: FieldDescriptorProto.TYPE_STRING,
    betterproto2.TYPE_BYTES: FieldDescriptorProto.TYPE_BYTES,
    betterproto2.TYPE_ENUM: FieldDescriptorProto.TYPE_INT32,
}
_HEAD: Final = '''"""Generated from envoy-data-plane by `make generate`; do not edit."""

from collections.abc import Iterable, Mapping
from typing import Literal

from google.protobuf.internal.containers import (
    MessageMap,
    RepeatedCompositeFieldContainer,
    RepeatedScalarFieldContainer,
    ScalarMap,
)
from google.protobuf.message import Message
'''
_PYTHON: Final = {
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_DOUBLE: "float",
}


def describe(roots: Iterable[type[betterproto2.Message]] = ROOTS) -> FileDescriptorSet:
    """A descriptor for every message reachable from ``roots``, sorted by name, in one file."""
    messages: dict[str, DescriptorProto] = {}
    origin: dict[str, type[betterproto2.Message]] = {}
    waiting = list(roots)
    while waiting:
        cls = waiting.pop()
        name = cls.__name__
        if origin.setdefault(name, cls) is not cls:
            msg = f"two Envoy messages are called {name}: {origin[name].__module__} and {cls.__module__}"
            raise TypeError(msg)
        if name not in messages:
            messages[name], reached = _describe_message(cls)
            waiting.extend(reached)
    file = FileDescriptorProto(name=_FILE, syntax="proto3", message_type=[messages[name] for name in sorted(messages)])
    return FileDescriptorSet(file=[file])


def _describe_message(cls: type[betterproto2.Message]) -> tuple[DescriptorProto, list[type[betterproto2.Message]]]:
    """The message's descriptor, and the messages that its fields hold."""
    message = DescriptorProto(name=cls.__name__)
    reached: list[type[betterproto2.Message]] = []
    oneofs: dict[str, int] = {}
    for name, meta, field_cls in _fields(cls):
        field = message.field.add(name=name, number=meta.number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if meta.repeated:
            field.label = FieldDescriptorProto.LABEL_REPEATED
        if meta.map_meta is not None:
            reached.extend(_describe_map(message, field, meta.map_meta, field_cls))
        else:
            reached.extend(_set_type(field, meta, field_cls))
        if meta.group is not None:
            if meta.group not in oneofs:
                oneofs[meta.group] = len(oneofs)
                message.oneof_decl.add(name=meta.group)
            field.oneof_index = oneofs[meta.group]
    return message, reached


def _fields(cls: type[betterproto2.Message]) -> Iterator[tuple[str, betterproto2.FieldMetadata, type]]:
    # betterproto2 has no public view of a message's schema, and its descriptor's type does not admit access by class
    metadata: betterproto2.ProtoClassMetadata = cls._betterproto  # type: ignore[arg-type]
    for name in metadata.sorted_field_names:
        meta = metadata.meta_by_field_name[name]
        is_map = meta.map_meta is not None
        yield name.rstrip("_"), meta, metadata.cls_by_field[f"{name}.value" if is_map else name]


def _set_type(
    field: FieldDescriptorProto, meta: betterproto2.FieldMetadata, field_cls: type
) -> list[type[betterproto2.Message]]:
    if meta.proto_type != betterproto2.TYPE_MESSAGE:
        field.type = _SCALARS[meta.proto_type]
        return []
    target = meta.unwrap() if meta.unwrap is not None else field_cls
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{target.__name__}"
    return [target]


def _describe_map(
    message: DescriptorProto,
    field: FieldDescriptorProto,
    map_meta: tuple[betterproto2.FieldMetadata, betterproto2.FieldMetadata],
    value_cls: type,
) -> list[type[betterproto2.Message]]:
    """A map is a repeated nested message of key and value, marked as an entry (protobuf's own encoding of maps)."""
    entry = message.nested_type.add(name="".join(part.capitalize() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    key = entry.field.add(name="key", number=1, label=FieldDescriptorProto.LABEL_OPTIONAL)
    key.type = _SCALARS[map_meta[0].proto_type]
    value = entry.field.add(name="value", number=2, label=FieldDescriptorProto.LABEL_OPTIONAL)
    field.label = FieldDescriptorProto.LABEL_REPEATED
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{message.name}.{entry.name}"
    return _set_type(value, map_meta[1], value_cls)


def render_stubs(described: FileDescriptorSet) -> str:
    """The whole stub file."""
    messages = [_render_message(message) for file in described.file for message in file.message_type]
    return "\n\n".join([_HEAD, *messages]) + "\n"


def _render_message(message: DescriptorProto) -> str:
    entries = {f".{message.name}.{entry.name}": entry for entry in message.nested_type}
    lines = [f"class {message.name}(Message):"]
    arguments = []
    for field in message.field:
        held, taken = _types(field, entries)
        is_plain = (
            field.type != FieldDescriptorProto.TYPE_MESSAGE and field.label != FieldDescriptorProto.LABEL_REPEATED
        )
        if is_plain:
            lines.append(f"    {field.name}: {held}")
        else:
            lines.extend(["    @property", f"    def {field.name}(self) -> {held}: ..."])
        arguments.append(f"{field.name}: {taken} | None = ...")
    parameters = f"self, *, {', '.join(arguments)}" if arguments else "self"
    lines.append(f"    def __init__({parameters}) -> None: ...")
    lines.extend(_render_presence(message))
    return "\n".join(lines)


def _types(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> tuple[str, str]:
    """The type that reading the field gives, and the type that the constructor takes."""
    entry = entries.get(field.type_name)
    if entry is not None:
        key, value = (_element(part) for part in entry.field)
        is_message = entry.field[1].type == FieldDescriptorProto.TYPE_MESSAGE
        return f"{'MessageMap' if is_message else 'ScalarMap'}[{key}, {value}]", f"Mapping[{key}, {value}]"
    element = _element(field)
    if field.label != FieldDescriptorProto.LABEL_REPEATED:
        return element, element
    is_message = field.type == FieldDescriptorProto.TYPE_MESSAGE
    kind = "RepeatedCompositeFieldContainer" if is_message else "RepeatedScalarFieldContainer"
    return f"{kind}[{element}]", f"Iterable[{element}]"


def _element(field: FieldDescriptorProto) -> str:
    return field.type_name.lstrip(".") or _PYTHON.get(field.type, "int")


def _render_presence(message: DescriptorProto) -> list[str]:
    """``HasField`` and ``WhichOneof``, with the names that they accept."""
    present = [
        field.name
        for field in message.field
        if field.HasField("oneof_index")
        or (field.type == FieldDescriptorProto.TYPE_MESSAGE and field.label != FieldDescriptorProto.LABEL_REPEATED)
    ]
    lines = []
    if present:
        names = ", ".join(f'"{name}"' for name in present)
        lines.append(f"    def HasField(self, field_name: Literal[{names}]) -> bool: ...")
    if len(message.oneof_decl) == 1:
        (group,) = message.oneof_decl
        names = ", ".join(f'"{field.name}"' for field in message.field if field.HasField("oneof_index"))
        lines.append(f'    def WhichOneof(self, oneof_group: Literal["{group.name}"]) -> Literal[{names}] | None: ...')
    return lines


def derived_files() -> dict[Path, bytes]:
    """The derived files, as the installed envoy-data-plane would have them."""
    described = describe()
    return {
        _STREAMS / "messages.binpb": described.SerializeToString(deterministic=True),
        _STREAMS / "messages.pyi": render_stubs(described).encode(),
    }
