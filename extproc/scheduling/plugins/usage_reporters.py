# SPDX-License-Identifier: Apache-2.0
"""Usage reporters: numbers in the metadata of an answer's last message, by expressions over token usage.

The expressions are the part of CEL that such files use. Numbers, truths and texts; ``usage`` and its fields by
``.name`` or ``["name"]``; ``has()``, ``int()``, ``double()``; ``!``, ``* / %``, ``+ -``, comparisons, ``&&``, ``||``
and ``a ? b : c``, with CEL's precedence. Whole and other numbers mix freely here. Source: the language definition of
the Common Expression Language.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import msgspec

Evaluate = Callable[[Mapping[str, object]], object]
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)u?|(?P<name>[A-Za-z_]\w*)|(?P<text>"[^"\\\n]*"|'[^'\\\n]*')"""
    r"""|(?P<sign>\|\||&&|[=!<>]=|[-+*/%!<>?:.()\[\]]))""",
    re.ASCII,
)
_LITERALS: Final = {"true": True, "false": False, "null": None}
_MOST_CHARACTERS: Final = 4096
_DEEPEST: Final = 64
# A chain of signs is evaluated with a recursion as deep as it is long, and Python's stack is bounded.
_MOST_TOKENS: Final = 512
_SUMS: Final[Mapping[str, Callable[[float, float], float]]] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
_RELATIONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_Text = Annotated[str, msgspec.Meta(min_length=1)]
# Beyond it a double is no whole number for certain, and Envoy's metadata have doubles.
_MOST: Final = 2**53


def compile_usage_expression(text: str) -> Evaluate:
    """A function of ``usage``, which raises ArithmeticError, KeyError or TypeError where CEL has no value.

    Raises ValueError with the part that cannot be read.
    """
    parser = _Parser(text)
    found = parser.choice()
    parser.end()
    return found


class _Parser:
    """Recursive descent, one method for each precedence."""

    def __init__(self, text: str) -> None:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"is longer than {_MOST_CHARACTERS} characters; write less")
        self._text = text
        self._tokens = _tokens_of(text)
        if len(self._tokens) > _MOST_TOKENS:
            raise ValueError(f"has more than {_MOST_TOKENS} names, numbers and signs; write less")
        self._at = 0
        self._depth = 0

    def choice(self) -> Evaluate:
        """``a ? b : c``, or what binds closer."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("is nested too deeply; write less")
        condition = self._either()
        if self._takes("?"):
            yes = self.choice()
            self._expects(":")
            no = self.choice()
            found = _chosen(condition, yes, no)
        else:
            found = condition
        self._depth -= 1
        return found

    def end(self) -> None:
        """Nothing is left."""
        if self._at < len(self._tokens):
            raise self._problem()

    def _either(self) -> Evaluate:
        found = self._both()
        while self._takes("||"):
            found = _either(found, self._both())
        return found

    def _both(self) -> Evaluate:
        found = self._relation()
        while self._takes("&&"):
            found = _both(found, self._relation())
        return found

    def _relation(self) -> Evaluate:
        found = self._sum()
        while (sign := self._next_of(_RELATIONS)) is not None:
            found = _related(_RELATIONS[sign], found, self._sum())
        return found

    def _sum(self) -> Evaluate:
        found = self._product()
        while (sign := self._next_of(_SUMS)) is not None:
            found = _reckoned(_SUMS[sign], found, self._product())
        return found

    def _product(self) -> Evaluate:
        found = self._unary()
        while (sign := self._next_of(_PRODUCTS)) is not None:
            found = _reckoned(_PRODUCTS[sign], found, self._unary())
        return found

    def _unary(self) -> Evaluate:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("is nested too deeply; write less")
        found = self._signed()
        self._depth -= 1
        return found

    def _signed(self) -> Evaluate:
        if self._takes("!"):
            inner = self._unary()
            return lambda usage: not _truth(inner(usage))
        if self._takes("-"):
            inner = self._unary()
            return lambda usage: -_number(inner(usage))
        return self._member()

    def _member(self) -> Evaluate:
        found = self._primary()
        while True:
            if self._takes("."):
                found = _field(found, self._name())
            elif self._takes("["):
                kind, key = self._take()
                if kind != "text":
                    raise self._problem(back=1)
                self._expects("]")
                found = _field(found, key)
            else:
                return found

    def _primary(self) -> Evaluate:
        kind, word = self._take()
        if kind == "number":
            number = float(word)
            return lambda _: number
        if kind == "text":
            return lambda _: word
        if word == "(":
            found = self.choice()
            self._expects(")")
            return found
        if word == "usage":
            return lambda usage: usage
        if word in _LITERALS:
            literal = _LITERALS[word]
            return lambda _: literal
        if word in {"has", "int", "double"} and self._takes("("):
            inner = self.choice()
            self._expects(")")
            return _is_there(inner) if word == "has" else _converted(word, inner)
        raise self._problem(back=1)

    def _name(self) -> str:
        kind, word = self._take()
        if kind != "name":
            raise self._problem(back=1)
        return word

    def _take(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise ValueError("ends too early; write an expression over usage, such as usage.prompt_tokens")
        kind, word, _ = self._tokens[self._at]
        self._at += 1
        return kind, word

    def _takes(self, sign: str) -> bool:
        is_next = self._at < len(self._tokens) and self._tokens[self._at][:2] == ("sign", sign)
        self._at += is_next
        return is_next

    def _next_of(self, signs: Mapping[str, object]) -> str | None:
        if self._at < len(self._tokens):
            kind, word, _ = self._tokens[self._at]
            if kind == "sign" and word in signs:
                self._at += 1
                return word
        return None

    def _expects(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._problem() if self._at < len(self._tokens) else ValueError(f"lacks '{sign}' at its end")

    def _problem(self, *, back: int = 0) -> ValueError:
        _, word, column = self._tokens[self._at - back]
        return ValueError(
            f"cannot be read at '{word}' (character {column + 1}); there are usage and its fields, numbers, has(),"
            " int(), double(), and CEL's signs"
        )


def _tokens_of(text: str) -> list[tuple[str, str, int]]:
    """Kind, word and where it begins."""
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at, end)
        if match is None:
            raise ValueError(f"cannot be read at character {at + 1}: '{text[at : at + 20].strip()}'")
        kind = str(match.lastgroup)
        word = match.group(kind)
        found.append((kind, word[1:-1] if kind == "text" else word, match.start(kind)))
        at = match.end()
    return found


def _chosen(condition: Evaluate, yes: Evaluate, no: Evaluate) -> Evaluate:
    return lambda usage: yes(usage) if _truth(condition(usage)) else no(usage)


def _either(left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda usage: _truth(left(usage)) or _truth(right(usage))


def _both(left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda usage: _truth(left(usage)) and _truth(right(usage))


def _related(compare: Callable[[float, float], bool], left: Evaluate, right: Evaluate) -> Evaluate:
    if compare in {operator.eq, operator.ne}:
        return lambda usage: compare(left(usage), right(usage))
    return lambda usage: compare(_number(left(usage)), _number(right(usage)))


def _reckoned(reckon: Callable[[float, float], float], left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda usage: reckon(_number(left(usage)), _number(right(usage)))


def _field(of: Evaluate, name: str) -> Evaluate:
    def value(usage: Mapping[str, object]) -> object:
        found = of(usage)
        if not isinstance(found, Mapping):
            raise TypeError(f"no object has the field '{name}'")
        return found[name]

    return value


def _is_there(field: Evaluate) -> Evaluate:
    def value(usage: Mapping[str, object]) -> bool:
        try:
            return field(usage) is not None
        except KeyError:
            return False

    return value


def _converted(word: str, inner: Evaluate) -> Evaluate:
    if word == "int":
        return lambda usage: _whole(_number(inner(usage)))
    return lambda usage: _number(inner(usage))


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("is no truth")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("is no number")
    return float(value)


def _whole(value: float) -> float:
    if not math.isfinite(value):
        raise ArithmeticError("is no whole number")
    return float(int(value))


class MetadataKey(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Where the value goes in the dynamic metadata of the gateway."""

    name: _Text
    namespace: str = ""


class ReportedAttribute(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``expression``: the value. ``condition``: whether there is one; without it, always."""

    key: MetadataKey
    expression: _Text
    condition: str = ""


class RequestAttributeReporter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``request-attribute-reporter``: sends the gateway a number that is computed from the answer's token
    usage.

    The number is in the dynamic metadata of the answer's last message, so only gateways that send answers through
    extproc (FULL_DUPLEX_STREAMED) get it. ``expression`` and ``condition`` are in CEL: ``usage.prompt_tokens``,
    ``usage.completion_tokens``, ``usage.total_tokens`` and ``usage.prompt_tokens_details.cached_tokens``. Fractions are
    cut off. A value of 0, or none, is not sent.
    """

    attributes: Annotated[tuple[ReportedAttribute, ...], msgspec.Meta(min_length=1, max_length=1)]

    def __post_init__(self) -> None:
        """Raise ValueError if an expression cannot be read."""
        for field in ("expression", "condition"):
            text = getattr(self.attributes[0], field)
            if text.strip() or field == "expression":
                try:
                    compile_usage_expression(text)
                except ValueError as error:
                    raise ValueError(f"attributes[0].{field} {error}") from None

    def reporter(self) -> CompiledReporter:
        """With its expressions compiled."""
        (one,) = self.attributes
        condition = compile_usage_expression(one.condition) if one.condition.strip() else None
        return CompiledReporter(
            one.key.namespace or "envoy.lb", one.key.name, compile_usage_expression(one.expression), condition
        )


class CompiledReporter(msgspec.Struct, frozen=True):
    """The value's key in the metadata, and its computation."""

    namespace: str
    name: str
    expression: Evaluate
    condition: Evaluate | None

    def value(self, usage: Mapping[str, object]) -> int:
        """The number; 0 for none."""
        try:
            if self.condition is not None and self.condition(usage) is not True:
                return 0
            found = self.expression(usage)
        except (ArithmeticError, KeyError, TypeError):
            # as in llm-d, nothing is sent for an answer without the field
            return 0
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            return 0
        return int(found) if abs(found) <= _MOST else 0
