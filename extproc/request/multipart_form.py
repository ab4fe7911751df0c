# SPDX-License-Identifier: Apache-2.0
"""Bodies that are forms (``multipart/form-data``, RFC 7578): their fields, and the same form with other ones.

Fields must be read as an engine reads them. Readers differ in what they make of odd forms, so a form is refused unless
it is written as clients' libraries write it: no text around the parts, the boundary nowhere else, quoted names without
escapes, no encodings, and each name once, but for names that end with ``[]``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.refusals import BadRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MOST_PARTS: Final = 64
# Of all parts but the file.
_MOST_OTHER_BYTES: Final = 1024 * 1024
_MOST_HEAD_BYTES: Final = 4096
_CONTENT_TYPE: Final = re.compile(
    r"""multipart/form-data[ \t]*;[ \t]*
    boundary=(?:"([A-Za-z0-9'()+_,./:=?\ -]{0,69}[^"\\\ ])"|([A-Za-z0-9'+_./-]{1,70}))""",
    re.IGNORECASE | re.VERBOSE,
)
_DISPOSITION: Final = re.compile(
    r"""form-data;[ \t]*name="([^"\\\x00-\x1f]+)"
    (?P<file>[ \t]*;[ \t]*filename="[^"\\\x00-\x1f]*")?
    (?P<encoded>[ \t]*;[ \t]*filename\*=[^;"\s]*)?""",
    re.IGNORECASE | re.VERBOSE,
)
_PART_HEADERS: Final = frozenset({"content-disposition", "content-type", "content-length"})


class FormPart(msgspec.Struct, frozen=True):
    """A field, or a file. ``start``, ``value`` and ``end``: where its delimiter begins, its value, and its end."""

    name: str
    is_file: bool
    start: int
    value: int
    end: int


class Form(msgspec.Struct, frozen=True):
    """A form as it was sent, and its parts in order."""

    body: bytes
    boundary: bytes
    parts: tuple[FormPart, ...]

    @property
    def names(self) -> frozenset[str]:
        """Those of all parts."""
        return frozenset(part.name for part in self.parts)

    def text(self, name: str) -> str | None:
        """The value of a field, None if there is none; raises BadRequest for a file and for what is not UTF-8."""
        part = next((one for one in self.parts if one.name == name), None)
        if part is None:
            return None
        if part.is_file:
            raise BadRequest(f"'{name}' must be a field, not a file.", param=name)
        try:
            return self.body[part.value : part.end].decode()
        except UnicodeDecodeError:
            raise BadRequest(f"'{name}' is not UTF-8.", param=name) from None

    def file(self, name: str) -> memoryview | None:
        """The content of a file, None if there is none; raises BadRequest if it is a field."""
        part = next((one for one in self.parts if one.name == name), None)
        if part is not None and not part.is_file:
            raise BadRequest(f"'{name}' must be a file.", param=name)
        return None if part is None else memoryview(self.body)[part.value : part.end]


def read_form(body: bytes, content_type: str) -> Form:
    """Raises BadRequest if the body is no such form."""
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        raise BadRequest(
            "The body must be a form; send it as 'multipart/form-data; boundary=...', nothing else beside."
        )
    delimiter = b"--" + (found[1] or found[2]).encode()
    parts: list[FormPart] = []
    start = 0
    while body.startswith(delimiter + b"\r\n", start):
        value = body.find(b"\r\n\r\n", start, start + len(delimiter) + _MOST_HEAD_BYTES) + 4
        end = body.find(b"\r\n" + delimiter, value - 2)
        if value < 4 or end < value or len(parts) == MOST_PARTS:
            raise _odd(f"has more than {MOST_PARTS} parts, or one that does not end")
        name, is_file = _head(body[start + len(delimiter) + 2 : value - 4])
        parts.append(FormPart(name, is_file, start, value, end))
        start = end + 2
    if not parts or body[start:].rstrip(b"\r\n") != delimiter + b"--" or body.count(delimiter) != len(parts) + 1:
        raise _odd("does not end with its boundary, or has something around its parts")
    names = [part.name for part in parts if not part.name.endswith("[]")]
    if len(names) != len(set(names)):
        raise _odd("has a name twice")
    if sum(part.end - part.start for part in parts if not part.is_file) > _MOST_OTHER_BYTES:
        raise BadRequest(f"The fields beside the file have more than {_MOST_OTHER_BYTES} bytes; send shorter ones.")
    return Form(body, delimiter[2:], tuple(parts))


def with_fields(form: Form, changes: Mapping[str, str], *, without: Collection[str] = ()) -> bytes:
    """The form with other values of fields that it has, and without some; all else byte for byte."""
    body, pieces = memoryview(form.body), []
    for part in form.parts:
        if part.name in without:
            continue
        changed = changes.get(part.name)
        value = body[part.value : part.end] if changed is None else changed.encode()
        pieces += [body[part.start : part.value], value, b"\r\n"]
    return b"".join((*pieces, b"--", form.boundary, b"--\r\n"))


def _head(lines: bytes) -> tuple[str, bool]:
    """The name of a part, and whether it is a file."""
    headers: dict[str, str] = {}
    for line in lines.decode("latin-1").split("\r\n"):
        name, colon, value = line.partition(":")
        known = name.lower()
        if not colon or known not in _PART_HEADERS or known in headers:
            raise _odd("has parts with other headers than content-disposition and content-type")
        headers[known] = value.strip(" \t")
    found = _DISPOSITION.fullmatch(headers.get("content-disposition", ""))
    if found is None:
        raise _odd('has a part without content-disposition: form-data; name="..."')
    is_file = found["file"] is not None or found["encoded"] is not None
    return found[1].encode("latin-1").decode(errors="replace"), is_file


def _odd(what: str) -> BadRequest:
    return BadRequest(f"The form {what}; send it as HTTP libraries write it.")
