# SPDX-License-Identifier: Apache-2.0
"""Messages of Envoy's schema as plain JSON data, the xDS files that hold them, and a memo of what has not changed.

``plain`` writes what the library's own ``to_dict`` writes; a test compares the two. ``to_dict`` evaluates the
annotations of a class and builds its validator anew for every message: a millisecond each, and a route has some twenty
messages. Here the plan for a class is made once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import typing
from base64 import b64encode
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar, cast

import betterproto2
import msgspec
import xxhash
from betterproto2 import FieldMetadata, Message
from envoy_data_plane.envoy.config.core.v3 import Address, Pipe, SocketAddress, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any
from envoy_data_plane.message_pool import default_message_pool

from extproc.api.addresses import parse_envoy_upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from betterproto2 import Casing

Write: typing.TypeAlias = "Callable[[typing.Any], object]"
_INTEGERS_AS_TEXT: Final = frozenset(
    {
        betterproto2.TYPE_INT64,
        betterproto2.TYPE_UINT64,
        betterproto2.TYPE_SINT64,
        betterproto2.TYPE_FIXED64,
        betterproto2.TYPE_SFIXED64,
    }
)
_FLOATS: Final = frozenset({betterproto2.TYPE_FLOAT, betterproto2.TYPE_DOUBLE})
T = TypeVar("T")


def _as_it_is(name: str) -> str:
    """Envoy's own field names: the default camel case breaks those with digits, such as consecutive_5xx."""
    return name


# the parameter is annotated as an enum of callables; any callable will do
PROTO_NAMES: Final = cast("Casing", _as_it_is)


class PackedMessage(Any):
    """An ``Any`` that keeps its message: it becomes bytes only for a reader of bytes."""

    def __init__(self, message: Message) -> None:
        super().__init__(type_url=type_url(message))
        self.message = message

    def __bytes__(self) -> bytes:
        return bytes(Any.pack(self.message))

    def unpack(self, message_pool: object = None) -> Message:  # noqa: ARG002 - the library's signature
        """The message itself."""
        return self.message

    def to_dict(self, **options: typing.Any) -> dict[str, typing.Any]:  # noqa: ANN401 - the library's signature
        """What the library writes."""
        return Any.pack(self.message).to_dict(**options)


class _Field(typing.NamedTuple):
    """How a field is written. ``is_optional``: None means absent, and any other value is written."""

    attribute: str
    name: str
    is_optional: bool
    write: Write


def type_url(message: Message) -> str:
    """How an ``Any`` calls the type of ``message``."""
    return default_message_pool.type_to_url[type(message)]


def message_json(message: Message) -> typing.Any:  # noqa: ANN401 - any JSON value
    """``message`` as JSON data under the names of Envoy's fields; fields of default value are left out.

    Raises pydantic's ValidationError for a field of the wrong type.
    """
    if isinstance(message, PackedMessage):
        return _plain_packed(message)
    cls = type(message)
    if cls.to_dict is not Message.to_dict:
        # durations, wrapped numbers, JSON values: small, and in a form of their own
        return message.to_dict(casing=PROTO_NAMES)
    _validate(message)
    found: dict[str, object] = {}
    for field in _fields(cls):
        value = getattr(message, field.attribute)
        if value if not field.is_optional else value is not None:
            found[field.name] = field.write(value)
    return found


def _plain_packed(packed: PackedMessage) -> dict[str, object]:
    inner, written = packed.message, message_json(packed.message)
    own = written if type(inner).to_dict is Message.to_dict else {"value": written}
    return {"@type": packed.type_url, **own}


def _validate(message: Message) -> None:
    """Messages are checked when they are made, but fields may have been set since."""
    values = vars(message).copy()
    values.pop("_unknown_fields", None)
    type(message).__pydantic_validator__.validate_python(values)  # type: ignore[attr-defined]  # pydantic's dataclasses have it


@cache
def _fields(cls: type[Message]) -> tuple[_Field, ...]:
    """In the order in which they are written."""
    return tuple(_field(cls, one) for one in dataclasses.fields(cls))  # type: ignore[arg-type]  # each is a dataclass


def _field(cls: type[Message], field: dataclasses.Field[typing.Any]) -> _Field:
    known = FieldMetadata.get(field)
    write: Write
    if known.repeated:
        one = _write(cls, field.name, known)
        write = lambda values: [one(value) for value in values]  # noqa: E731 - a function for each field
    elif known.map_meta is not None:
        of_key, of_value = (_write(cls, field.name, meta, index) for index, meta in enumerate(known.map_meta))
        write = lambda values: {of_key(key): of_value(value) for key, value in values.items()}  # noqa: E731 - as above
    else:
        write = _write(cls, field.name, known)
    is_single = not known.repeated and known.map_meta is None
    is_optional = is_single and bool(known.optional or known.proto_type == betterproto2.TYPE_MESSAGE)
    return _Field(field.name, field.name.rstrip("_"), is_optional, write)


def _write(cls: type[Message], name: str, known: FieldMetadata, argument: int = 0) -> Write:
    """How one value is written. ``argument``: which of the type's, for an enum in a list or a map."""
    kind = known.proto_type
    if kind == betterproto2.TYPE_MESSAGE:
        unwrap = known.unwrap
        return message_json if unwrap is None else lambda value: message_json(unwrap().from_wrapped(value))  # type: ignore[attr-defined]  # wrappers have it
    if kind == betterproto2.TYPE_ENUM:
        return _enum_writer(cls, name, argument)
    if kind in _INTEGERS_AS_TEXT:
        return str
    if kind == betterproto2.TYPE_BYTES:
        return lambda value: b64encode(value).decode()
    return _number if kind in _FLOATS else _same


def _enum_writer(cls: type[Message], name: str, argument: int) -> Write:
    hint = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]))[name]
    enum = (typing.get_args(hint) or (hint,) * (argument + 1))[argument]

    def write(value: int) -> object:
        member = enum(value)
        # a value outside the schema has no name
        return member.proto_name or member.name or member.value

    return write


def _same(value: object) -> object:
    return value


def _number(value: float) -> object:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def typed_extension(name: str, message: Message) -> TypedExtensionConfig:
    """An extension called ``name`` with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=PackedMessage(message))


def http_filter(name: str, message: Message) -> HttpFilter:
    """An HTTP filter called ``name`` with its configuration."""
    return HttpFilter(name=name, typed_config=PackedMessage(message))


def duration(value: float) -> timedelta:
    """Envoy's durations are timedeltas here and strings such as ``0.250s`` in JSON."""
    return timedelta(seconds=value)


def envoy_address(text: str) -> Address:
    """``ip:port``, ``name:port`` or ``unix:path``."""
    if text.startswith("unix:"):
        return Address(pipe=Pipe(path=text.removeprefix("unix:")))
    target = parse_envoy_upstream(text)
    return Address(socket_address=SocketAddress(address=target.host, port_value=target.port))


def to_json(message: Message) -> str:
    """A whole message as a file."""
    return json.dumps(to_plain(message), indent=1) + "\n"


def to_plain(message: Message) -> dict[str, object]:
    """A message as plain JSON data."""
    found: dict[str, object] = message_json(message)
    return found


def to_resource(message: Message) -> dict[str, object]:
    """The same with its type, as a resource of xDS."""
    return to_plain(PackedMessage(message))


def resources_file(resources: Sequence[Mapping[str, object]]) -> str:
    """A file of xDS: a DiscoveryResponse with ``resources``, its version a digest of them."""
    version = xxhash.xxh3_64_hexdigest(json.dumps(resources).encode())
    # json indents in Python, which takes a second for some hundred routes
    text = msgspec.json.encode({"version_info": version, "resources": list(resources)})
    return msgspec.json.format(text, indent=1).decode() + "\n"


class BuildMemo:
    """Results by function and arguments; a result that two consecutive builds did not use is evicted.

    Arguments are compared by identity, which the configuration's loader keeps while a document stays the same; text and
    numbers by value.
    """

    def __init__(self) -> None:
        self._now: dict[Hashable, tuple[tuple[object, ...], typing.Any]] = {}
        self._before: dict[Hashable, tuple[tuple[object, ...], typing.Any]] = {}

    def start_build(self) -> None:
        """Start another build: results used from now on belong to it."""
        self._before, self._now = self._now, {}

    def get(self, make: Callable[..., T], *given: object) -> T:
        """``make(*given)``, or its cached result, which must not be changed."""
        key = (make, *(one if isinstance(one, str | int | float) else id(one) for one in given))
        found = self._now.get(key) or self._before.get(key)
        if found is None:
            # the arguments are kept with the result: while they live, nothing else has their identity
            found = given, make(*given)
        self._now[key] = found
        result: T = found[1]
        return result
