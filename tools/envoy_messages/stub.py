# SPDX-License-Identifier: Apache-2.0
"""Static types of the message classes, so that mypy finds a misspelt field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

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


def render(described: FileDescriptorSet) -> str:
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
