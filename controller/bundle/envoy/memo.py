# SPDX-License-Identifier: Apache-2.0
"""Remembers what was made from objects that have not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class Memo:
    """Results by function and arguments; what two builds in a row did not ask for is forgotten.

    Arguments are compared by identity, which the configuration's loader keeps while a document stays the same; text and
    numbers by value.
    """

    def __init__(self) -> None:
        self._now: dict[Hashable, tuple[tuple[object, ...], Any]] = {}
        self._before: dict[Hashable, tuple[tuple[object, ...], Any]] = {}

    def next_build(self) -> None:
        """What is asked for from here on belongs to another build."""
        self._before, self._now = self._now, {}

    def get(self, make: Callable[..., T], *given: object) -> T:
        """``make(*given)``, or what that gave before. Nobody may change it."""
        key = (make, *(one if isinstance(one, str | int | float) else id(one) for one in given))
        found = self._now.get(key) or self._before.get(key)
        if found is None:
            # the arguments are kept with the result: while they live, nothing else has their identity
            found = given, make(*given)
        self._now[key] = found
        result: T = found[1]
        return result
