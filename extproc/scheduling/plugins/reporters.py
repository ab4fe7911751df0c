# SPDX-License-Identifier: Apache-2.0
"""What answers tell the gateway of a request, in the metadata of their last message."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from extproc.scheduling.plugins.usage_expressions import Evaluate, compile_usage

if TYPE_CHECKING:
    from collections.abc import Mapping

_Text = Annotated[str, msgspec.Meta(min_length=1)]
# Beyond it a double is no whole number for certain, and Envoy's metadata have doubles.
_MOST: Final = 2**53


class AttributeKey(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Where the value goes in the dynamic metadata of the gateway."""

    name: _Text
    namespace: str = ""


class Attribute(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``expression``: the value. ``condition``: whether there is one; without it, always."""

    key: AttributeKey
    expression: _Text
    condition: str = ""


class RequestAttributeReporter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``request-attribute-reporter``: tells the gateway a number that follows from the answer's token usage.

    It is in the dynamic metadata of the answer's last message, so gateways get it that send answers through here
    (FULL_DUPLEX_STREAMED). ``expression`` and ``condition`` are in CEL: ``usage.prompt_tokens``,
    ``usage.completion_tokens``, ``usage.total_tokens`` and ``usage.prompt_tokens_details.cached_tokens``. Fractions are
    cut off. A value of 0, or none, is not told.
    """

    attributes: Annotated[tuple[Attribute, ...], msgspec.Meta(min_length=1, max_length=1)]

    def __post_init__(self) -> None:
        """Raise ValueError if an expression cannot be read."""
        for field in ("expression", "condition"):
            text = getattr(self.attributes[0], field)
            if text.strip() or field == "expression":
                try:
                    compile_usage(text)
                except ValueError as error:
                    raise ValueError(f"attributes[0].{field} {error}") from None

    def reporter(self) -> Reporter:
        """With its expressions compiled."""
        (one,) = self.attributes
        condition = compile_usage(one.condition) if one.condition.strip() else None
        return Reporter(one.key.namespace or "envoy.lb", one.key.name, compile_usage(one.expression), condition)


class Reporter(msgspec.Struct, frozen=True):
    """Where the value goes, and how it is reckoned."""

    namespace: str
    name: str
    expression: Evaluate
    condition: Evaluate | None

    def value(self, usage: Mapping[str, object]) -> int:
        """0 if there is nothing to tell."""
        try:
            if self.condition is not None and self.condition(usage) is not True:
                return 0
            found = self.expression(usage)
        except (ArithmeticError, KeyError, TypeError):
            # as in llm-d, an answer without the field is told nothing of
            return 0
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            return 0
        return int(found) if abs(found) <= _MOST else 0
