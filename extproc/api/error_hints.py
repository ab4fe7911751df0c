# SPDX-License-Identifier: Apache-2.0
"""Corrections for mistakes in addresses, quantities, types and YAML.

For text that is no address of a server: what is missing, and the correct form.

For a duration, a size, a quantity or an amount of money that cannot be read: the probable meaning.

For a value of another type than its field's: both types in YAML's terms.

For a YAML parser's error: its cause in the terms of the file's author, and the line.
"""

from __future__ import annotations

import ipaddress
import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Mapping

    import yaml

_EXAMPLE_PORT = "8000"
_BARE_NUMBER: Final = re.compile(r"\d+(\.\d+)?", re.ASCII)
# How people write a unit that is refused, and how it is written here.
_SPOKEN: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", re.ASCII)
_MEANT: Final = {
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds", "millis"), "ms"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
}
_SIZE_UNITS: Final = frozenset("kmgtpe")
# Of a value that are shown.
_MOST_SHOWN: Final = 80
# Behind what was written.
NO_DURATION: Final = "is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h30m"
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)
_LONGEST: Final = 300
# What a field of such a type holds, and what to write there.
_WANTED: Final[Mapping[type[inspect.Type], tuple[tuple[type, ...], str]]] = MappingProxyType(
    {
        inspect.StrType: ((str,), "text"),
        inspect.IntType: ((int,), "a whole number"),
        inspect.FloatType: ((int, float), "a number"),
        inspect.BoolType: ((bool,), "true or false"),
        inspect.StructType: ((dict,), ""),
        inspect.DictType: ((dict,), "names with values, indented, such as name: value"),
        inspect.ListType: ((list,), "a list, each item on a line that begins with '- '"),
        inspect.VarTupleType: ((list,), "a list, each item on a line that begins with '- '"),
    }
)
_CALLED: Final[Mapping[type, str]] = MappingProxyType(
    {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        dict: "a mapping of fields",
        list: "a list",
    }
)
# Before the first character of a line's content; the dashes of list items count as indentation.
_TAB_IN_INDENT: Final = re.compile(r"[ ]*(?:-[ ]*)*\t")
_TWO_COLONS: Final = re.compile(r"^\s*(?:- +)?[\w.\"'-]+:\s+[^\"'\s].*:\s")
_MARKS: Final = ("<<<<<<<", "=======", ">>>>>>>")
# What YAML keeps for itself, and what begins an alias or an anchor.
_REFUSED_STARTS: Final = ("@", "`", "%", "*", "&")
_OTHER_SEPARATOR: Final = re.compile(r"\s+---+\s*|--|----+\s*")
# "name:value" or "name value", alone on its line.
_NO_COLON: Final = re.compile(r"\s*(?:- +)?([\w.-]+)(:| +)(?![:\s]).+")
_AFTER_QUOTE: Final = re.compile(r"""[^"']*: +(?:"[^"]*"|'[^']*') *[^\s#,}\]].*""")
# Where YAML reads braces; within text they do no harm.
_TEMPLATE: Final = re.compile(r"(?:.*[:-])?\s*\{\{")
_RENDER: Final = "holds a template ({{ }}), which is not filled in here; render it first"
_BLANKS: Final = ("\u00a0", "\u200b", "\u2003", "\u3000", "\ufeff")
# Lines before the one that the parser names.
_LOOKS_BACK: Final = 2


def address_hint(text: str, *, takes_names: bool) -> str:
    """Why ``text`` is not an address. ``takes_names``: a host name in place of the IP address is one."""
    return f"'{text}' is not an address; {_advice(text, takes_names=takes_names)}"


def _advice(text: str, *, takes_names: bool) -> str:
    host, separator, port = text.rpartition(":")
    if "://" in text:
        bare = text.partition("://")[2].partition("/")[0]
        return f"leave out scheme and path: {bare if ':' in bare else f'{bare}:{_EXAMPLE_PORT}'}"
    inner = next((one for one in (host, text) if ":" in one and is_ip(one)), "")
    if inner:
        return f"write an IPv6 address in brackets and a port after it: [{inner}]:{_EXAMPLE_PORT}"
    if is_port(text):
        return _about_target(text) if takes_names else _about_own("", text)
    if not separator or text.endswith("]"):
        return f"it has no port: write {text or '127.0.0.1'}:{_EXAMPLE_PORT}"
    return port_hint(port) or (_about_target(port) if takes_names else _about_own(host, port))


def port_hint(text: str) -> str:
    """Why ``text`` is not the number of a port; empty if it is one."""
    return "" if is_port(text) else f"'{text}' is not a port: write one from 1 to 65535"


def _about_target(port: str) -> str:
    return f"write IP:PORT or NAME:PORT, such as 127.0.0.1:{port} or engine-0.example.com:{port}"


def _about_own(host: str, port: str) -> str:
    """For the address on which a process listens."""
    own = f"write 0.0.0.0:{port} for all interfaces, or 127.0.0.1:{port} for this machine alone"
    if host in {"", "*"}:
        return own
    if host[:1].isalpha():
        return f"a process listens on an IP address of its own machine, not on a name: {own}"
    return f"write an IP address and a port, such as 127.0.0.1:{port} or [::1]:{port}"


def is_port(text: str) -> bool:
    """Whether ``text`` is the number of a port."""
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def is_ip(text: str) -> bool:
    """Whether ``text`` is an IP address, of either version and without a port."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def duration_hint(given: object) -> str:
    """Why ``given`` is no duration, and how it was probably meant."""
    if given is None:
        return "has no value; write a duration, such as 30s, or leave the field out"
    text = _as_written(given)
    if _BARE_NUMBER.fullmatch(text):
        return f"{text} has no unit; write {text}s if it is seconds, {text}ms if milliseconds"
    spoken = _SPOKEN.fullmatch(text)
    meant = spoken and _MEANT.get(spoken[2].lower())
    if spoken and meant and f"{spoken[1]}{meant}" != text:
        return f"'{text}' is not a duration; write {spoken[1]}{meant}"
    return f"'{text}' {NO_DURATION}"


def size_hint(given: object) -> str:
    """Why ``given`` is no size, and how it was probably meant."""
    if given is None:
        return "has no value; write a size, such as 64Mi, or leave the field out"
    text = _as_written(given)
    meant = _by_powers(text) or "write a whole number of bytes, or one with a unit, such as 512Ki, 64Mi or 1G"
    return f"'{text}' is not a size; {meant}"


def quantity_hint(given: object) -> str:
    """Why ``given`` is no quantity of Kubernetes, and how it was probably meant."""
    if given is None:
        return "has no value; write a quantity, such as 500 or 10Gi, or leave the field out"
    text = _as_written(given)
    meant = _by_powers(text) or "write a whole number, or one with a unit, such as 500, 1k, 10G or 10Gi"
    return f"'{text}' is not a quantity; {meant}"


def money_hint(given: object) -> str:
    """Why ``given`` is no amount of money, and how it is written."""
    if given is None:
        return "has no value; write an amount, such as 2.5, or leave the field out"
    advice = "write decimals without a currency, such as 2.5 or '0.075'"
    return f"'{_as_written(given)}' is not an amount of money; {advice}"


def _by_powers(text: str) -> str:
    """How a number with a unit as people write it, such as 10GB, is written; empty if it is none."""
    spoken = _SPOKEN.fullmatch(text)
    unit = spoken[2].lower().removesuffix("b").removesuffix("i") if spoken else ""
    if not spoken or unit not in _SIZE_UNITS or text.endswith(("m", "i")):
        return ""
    number, letter = spoken[1], unit.upper()
    return f"write {number}{letter}i for powers of 1024, {number}{'k' if unit == 'k' else letter} for powers of 1000"


def _as_written(given: object) -> str:
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def shape_hint(value: object, kind: inspect.Type, *, is_secret: bool) -> str:
    """The type of ``value``, and what to write instead; empty where the type is right. A secret's value is not
    repeated.
    """
    types, wanted = _WANTED.get(type(kind), ((object,), ""))
    if object in types or type(value) in types:
        return ""
    if isinstance(kind, inspect.StructType):
        wanted = f"fields, indented, such as {_some_fields(kind)}"
    if value is None:
        return f"has no value; write {wanted}"
    called = _CALLED.get(type(value), f"a {type(value).__name__}")
    if is_secret:
        return f"is {called}; write {wanted}"
    return f"{quote_value(value)} is {called}; {_about_quotes(value, kind) or f'write {wanted}'}"


def _about_quotes(value: object, kind: inspect.Type) -> str:
    """For a value that only quotes make text, or that lacks them; else empty."""
    if isinstance(kind, inspect.StrType):
        return "put it in quotes if it is meant as text" if isinstance(value, bool | int | float) else ""
    if not isinstance(value, str):
        return ""
    is_number = isinstance(kind, inspect.IntType | inspect.FloatType) and _NUMBER.fullmatch(value)
    is_boolean = isinstance(kind, inspect.BoolType) and value.lower() in {"true", "false"}
    return f"write {value.lower()} without quotes" if is_number or is_boolean else ""


def bounds_hint(value: object, kind: inspect.Type) -> str:
    """What to write instead of a number that is too small or too large; empty for another one."""
    if not isinstance(kind, inspect.IntType | inspect.FloatType) or not isinstance(value, int | float):
        return ""
    if kind.ge is not None and value < kind.ge:
        return f"{value} is too small; write at least {kind.ge}"
    if kind.gt is not None and value <= kind.gt:
        return f"{value} is too small; write more than {kind.gt:g}"
    if kind.le is not None and value > kind.le:
        return f"{value} is too large; write at most {kind.le}"
    return f"{value} is too large; write less than {kind.lt:g}" if kind.lt is not None and value >= kind.lt else ""


def quote_value(value: object) -> str:
    """As it could stand in the file, shortened."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _some_fields(kind: inspect.StructType) -> str:
    """The first three, of those that are required if any is."""
    names = [field.encode_name for field in kind.fields if field.required] or [one.encode_name for one in kind.fields]
    return ", ".join(f"{name}:" for name in names[:3])


def explain_syntax_error(text: str, error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """The line, from 0, and what is wrong there: the usual mistakes by their name, others in the parser's words."""
    mark = error.problem_mark or error.context_mark
    lines = text.split("\n")
    at = min(mark.line, len(lines) - 1) if mark else 0
    message = error.problem or error.context or "it cannot be parsed"
    begun = error.context_mark
    if "end of stream" in message and begun is not None and "quoted" in (error.context or ""):
        return begun.line, "a quote is opened here and never closed"
    if begun is not None and "flow" in (error.context or ""):
        return begun.line, "a bracket or brace is opened here and never closed, or an item has no comma after it"
    for number in range(at, max(-1, at - 1 - _LOOKS_BACK), -1):
        if found := _usual_nearby(lines[number]) or (number == at and _usual_here(lines[number], message)):
            return number, found
    before = lines[at - 1] if at else ""
    no_colon = _NO_COLON.fullmatch(before)
    if no_colon and ": " not in before and not before.rstrip().endswith(":") and "mapping values" in message:
        return at - 1, f"'{no_colon[1]}' is no field without a colon and a space after it; write {no_colon[1]}: VALUE"
    return at, _translated(message)


def explain_forbidden_character(text: str, error: yaml.reader.ReaderError) -> tuple[int, str]:
    """The line, from 0, of a character that YAML forbids."""
    position = getattr(error, "position", 0)
    character = getattr(error, "character", 0)
    code = character if isinstance(character, int) else ord(character[:1] or "\0")
    found = text.find(chr(code))
    line = text.count("\n", 0, found if found >= 0 else position)
    more = "; the file may be UTF-16, save it as UTF-8" if code == 0 else ""
    return line, f"the control character U+{code:04X}, which YAML forbids{more}"


def template_hint(text: str, line: int) -> str:
    """Advice for a template on this line, from 0; empty if there is none."""
    lines = text.split("\n")
    return _RENDER if line < len(lines) and _TEMPLATE.match(lines[line]) else ""


def _usual_nearby(line: str) -> str:
    """Mistakes that a parser may notice lines later."""
    if _TAB_IN_INDENT.match(line):
        return "a tab in the indentation, where YAML takes only spaces; replace each tab by spaces"
    if line.startswith(_MARKS):
        return "a mark of an unfinished merge (git); resolve the conflict"
    if _TEMPLATE.match(line):
        return _RENDER
    if any(one in line for one in _BLANKS):
        return "a blank that is no space (such as a no-break space); write plain spaces"
    if _OTHER_SEPARATOR.fullmatch(line):
        return "dashes that separate no documents; write '---' at the beginning of its line"
    return ""


def _usual_here(line: str, problem: str) -> str:
    """Mistakes of the line that the parser names."""
    if line.startswith("```"):
        return "a fence of Markdown; leave the line out"
    value = line.partition(": ")[2].lstrip() or line.lstrip(" -")
    if value.startswith(_REFUSED_STARTS) and (
        "cannot start any token" in problem or "alphabetic or numeric" in problem
    ):
        return f"a value must not begin with {value[0]}; put it in quotes"
    if "expected key" in problem and _AFTER_QUOTE.fullmatch(line):
        return "text after the closing quote; put the whole value in one pair of quotes"
    if "mapping values" in problem and _TWO_COLONS.match(line):
        return "a second ': ' in one line; put the value in quotes"
    return ""


def _translated(problem: str) -> str:
    if "mapping values are not allowed" in problem:
        return "a field stands deeper than the one before it, or a ':' above has no space after it; align the fields"
    if "could not find expected ':'" in problem:
        return "a line without 'name: value'; write a colon and a space after the name, here or in the line above"
    if "did not find expected key" in problem or "did not find expected '-' indicator" in problem:
        return "the indentation fits no line above; align it with the fields or items that it belongs to"
    return f"{problem}; mend the syntax"
