# SPDX-License-Identifier: Apache-2.0
"""The payload log: which requests and answers of a ModelRoute are kept, what is taken out of them, and where they go.

Who runs the gateway says where (GatewayConfig), so that nobody else has extproc write files or call addresses; the
owner of a ModelRoute says what.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
import re2  # type: ignore[import-untyped]

from extproc.api import spec as patterns
from extproc.api.quantities import ByteSize
from extproc.api.spec import CelRule, NonEmpty, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path

MOST_BYTES: Final = 1 << 20
_MOST_PROGRAM: Final = 2000
_NO_FILES: Final = ("/dev/", "/proc/", "/sys/")
_STEP: Final = re.compile(r"\.\.(?P<deep>[^.\[\]*]+)|\.(?P<name>[^.\[\]*]+)|\.(?P<all>\*)|\[(?P<each>\*|\d{1,6})\]")

JsonPath = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Expression = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Step = tuple[bool, str | None]
"""Whether it is at any depth, and the member's name or the element's number; None: all of them."""


class PayloadSink(Spec, frozen=True):
    """Where requests and answers go that ModelRoutes log (``payloadLog``), as CloudEvents with the attributes of
    KServe's logger. ``path``: a file to which extproc appends a line of JSON for each. ``url``: where it sends each by
    POST.
    """

    CEL: ClassVar = (CelRule("has(self.path) != has(self.url)", "write path or url"),)

    path: NonEmpty | None = None
    url: Annotated[str, msgspec.Meta(max_length=2048, pattern=patterns.NO_CONTROL)] | None = None


class Redaction(Spec, frozen=True):
    """What is replaced before anything is kept. ``paths``: members of the JSON body, such as ``$.user``,
    ``$.messages[*].content`` or ``$..password``. ``patterns``: RE2 expressions; what they match in any text is
    replaced.
    """

    paths: Annotated[tuple[JsonPath, ...], msgspec.Meta(max_length=32)] = ()
    patterns: Annotated[tuple[Expression, ...], msgspec.Meta(max_length=16)] = ()


class PayloadLog(Spec, frozen=True):
    """Keep requests and answers. ``mode``: which of both. ``sample``: the share of requests, 0 to 1. ``max_bytes``:
    bodies that are longer are logged without their content, so that no secret is cut in two before it is found; up to
    1Mi. ``redact``: what is replaced.
    """

    mode: Literal["All", "Request", "Response"] = "All"
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    max_bytes: ByteSize = ByteSize("64Ki")
    redact: Redaction = Redaction()


def parse_json_path(text: str) -> tuple[Step, ...]:
    """The steps of a JSON path: ``.name``, ``..name``, ``.*``, ``[*]`` and ``[0]``; raises ValueError for others."""
    steps, at = list[Step](), 1
    while text[:1] == "$" and at < len(text) and (found := _STEP.match(text, at)) is not None:
        name = found["deep"] or found["name"] or (None if found["all"] or found["each"] == "*" else found["each"])
        steps.append((found["deep"] is not None, name))
        at = found.end()
    if not steps or at < len(text):
        raise ValueError(
            f"'{text[:100]}' is no path that is known; write one such as $.messages[*].content or $..password"
        )
    return tuple(steps)


def compile_pattern(text: str) -> Any:  # noqa: ANN401 - the library has no types
    """Searches in linear time; raises ValueError."""
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text, options)
    except re2.error as error:
        why = error.args[0] if error.args else error
        raise ValueError(f"is no expression of RE2: {why.decode() if isinstance(why, bytes) else why}") from None
    if compiled.programsize > _MOST_PROGRAM:
        raise ValueError(
            f"compiles to {compiled.programsize} instructions, of {_MOST_PROGRAM}; write smaller repetitions"
        )
    if compiled.search("") is not None:
        raise ValueError("matches the empty text, so it would be everywhere; write one that needs a character")
    return compiled


def check_payload_log(spec: PayloadLog, path: Path) -> Iterator[Finding]:
    """Paths and patterns can be used, and bodies are bounded."""
    if not 1 <= spec.max_bytes <= MOST_BYTES:
        yield (*path, "maxBytes"), f"is {spec.max_bytes}; write a size from 1 to 1Mi"
    for name, read, texts in (
        ("paths", parse_json_path, spec.redact.paths),
        ("patterns", compile_pattern, spec.redact.patterns),
    ):
        for number, text in enumerate(texts):
            try:
                read(text)
            except ValueError as error:
                yield (*path, "redact", name, number), str(error)


def check_payload_sink(spec: PayloadSink, path: Path) -> Iterator[Finding]:
    """One of both, and usable."""
    if (spec.path is None) == (spec.url is None):
        yield path, "write path or url"
    example = "write one such as /var/lib/attache/payload.log"
    if spec.path is not None and (not spec.path.startswith("/") or spec.path.endswith("/")):
        yield (*path, "path"), f"'{spec.path}' is no absolute path of a file; {example}"
    elif spec.path is not None and posixpath.normpath(spec.path).startswith(_NO_FILES):
        yield (*path, "path"), f"'{spec.path}' is no file that can be kept; {example}"
    if spec.url is not None:
        try:
            check_sink_url(spec.url)
        except ValueError as error:
            yield (*path, "url"), str(error)


def check_sink_url(text: str) -> None:
    """Raises ValueError unless it is ``http(s)://HOST:PORT/PATH``, without credentials."""
    mistake = ValueError(f"'{text[:100]}' is no URL of HTTP; write one such as http://broker.example:8080/events")
    try:
        found = urlsplit(text)
        has_port = found.port is None or found.port > 0
    except ValueError:
        raise mistake from None
    if found.scheme not in {"http", "https"} or not found.hostname or found.username is not None or not has_port:
        raise mistake
