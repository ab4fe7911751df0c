# SPDX-License-Identifier: Apache-2.0
"""Rules of Kubernetes' CEL that stand beside a struct's fields and go into its CRD."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """One rule of a struct: ``self`` in ``rule`` is an object of it, and ``message`` says what to write instead.

    Only the CEL standard's own functions, so that rules can be tried without an API server.
    """

    rule: str
    message: str


def exactly_one(*fields: str) -> Rule:
    """Exactly one of the optional fields is there."""
    present = " + ".join(f"(has(self.{field}) ? 1 : 0)" for field in fields)
    return Rule(f"{present} == 1", f"write exactly one of {', '.join(fields)}")


def together(first: str, second: str) -> Rule:
    """Both optional fields are there, or neither is."""
    return Rule(f"has(self.{first}) == has(self.{second})", f"write both {first} and {second}, or neither")
