"""Writes ``messages.pyi``: static types for the derived messages, so that a misspelt field is an error of mypy's."""

from __future__ import annotations

import argparse
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from extproc.streams import messages
from extproc.streams.derive import describe

STUB = Path(__file__).with_name("messages.pyi")

_HEAD = '''"""Generated from envoy-data-plane by `make generate`; do not edit."""

from collections.abc import Iterable, Mapping
from typing import Literal

import betterproto2
from google.protobuf.internal.containers import MessageMap, RepeatedCompositeFieldContainer, RepeatedScalarFieldContainer, ScalarMap
from google.protobuf.message import Message

ROOTS: tuple[type[betterproto2.Message], ...]
'''

_PYTHON = {
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_DOUBLE: "float",
}


def render() -> str:
    """The whole stub file."""
    return "\n\n".join([_HEAD, *(_render_message(message) for message in describe(messages.ROOTS).message_type)]) + "\n"


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
    """What reading the field gives, and what the constructor takes."""
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


def main() -> None:
    """Write the stub beside the module that it describes."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    STUB.write_text(render())


if __name__ == "__main__":
    main()
