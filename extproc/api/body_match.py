# SPDX-License-Identifier: Apache-2.0
"""Conditions of a rule on the request's JSON body: its fields, and how long prompt and answer are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from extproc.api.spec import CelRule, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.config_errors import Finding, Path

# Each level below the top is read once more.
_DEEPEST: Final = 4
_NAME: Final = "[A-Za-z0-9_-]{1,64}"
_PATH: Final = re.compile(rf"{_NAME}(\.{_NAME}){{0,{_DEEPEST - 1}}}", re.ASCII)
LONGEST_TEXT: Final = 1024
_KINDS: Final = ("exists", "text", "boolean", "atLeast or atMost")
_ONE_KIND: Final = f"write exactly one of {', '.join(_KINDS)}"
_ANY_END: Final = "write atLeast, atMost or both"
_REVERSED: Final = "atLeast is above atMost, so no number is in between"
_ORDER: Final = CelRule("!has(self.atLeast) || !has(self.atMost) || self.atLeast <= self.atMost", _REVERSED)


class BodyCondition(Spec, frozen=True):
    """Of one field. ``exists``: the body has it, and it is not null; or the opposite. ``text``: it is this text.
    ``boolean``: it is true, or it is false. ``at_least``, ``at_most``: it is a number in this range.
    """

    CEL: ClassVar = (
        CelRule(
            "(has(self.exists) ? 1 : 0) + (has(self.text) ? 1 : 0) + (has(self.boolean) ? 1 : 0) + "
            "(has(self.atLeast) || has(self.atMost) ? 1 : 0) == 1",
            _ONE_KIND,
        ),
        _ORDER,
    )

    exists: bool | None = None
    text: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)] | None = None
    boolean: bool | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_range(self) -> bool:
        """Whether it is about a number."""
        return self.at_least is not None or self.at_most is not None


class TokenRange(Spec, frozen=True):
    """A range of a number of tokens. ``at_least``, ``at_most``: its ends, which belong to it; one may be left out."""

    CEL: ClassVar = (CelRule("has(self.atLeast) || has(self.atMost)", _ANY_END), _ORDER)

    at_least: Annotated[int, msgspec.Meta(ge=0)] | None = None
    at_most: Annotated[int, msgspec.Meta(ge=0)] | None = None


def check_body_conditions(given: Mapping[str, BodyCondition], path: Path) -> Iterator[Finding]:
    """Paths of fields, and conditions that can be met."""
    for name, one in given.items():
        if not _PATH.fullmatch(name):
            advice = f"write up to {_DEEPEST} names with dots between them, such as response_format.type"
            yield (*path, name), f"{name[:100]!a} is no path of a field; {advice}"
        if (one.exists is not None) + (one.text is not None) + (one.boolean is not None) + one.is_range != 1:
            yield (*path, name), _ONE_KIND
        yield from _check_order(one.at_least, one.at_most, (*path, name))


def check_range(given: TokenRange | None, path: Path) -> Iterator[Finding]:
    """At least one end, in the right order."""
    if given is not None:
        if given.at_least is None and given.at_most is None:
            yield path, _ANY_END
        yield from _check_order(given.at_least, given.at_most, path)


def _check_order(at_least: float | None, at_most: float | None, path: Path) -> Iterator[Finding]:
    if at_least is not None and at_most is not None and at_least > at_most:
        yield path, _REVERSED
