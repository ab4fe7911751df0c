# SPDX-License-Identifier: Apache-2.0
"""Sets of names, of which some begin or end with a star that stands for any text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Patterns(msgspec.Struct, frozen=True):
    """Names, of which some begin or end with ``*``."""

    exact: frozenset[str]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    is_anything: bool

    def __contains__(self, name: object) -> bool:
        if self.is_anything:
            return True
        if not isinstance(name, str):
            return False
        return name in self.exact or name.startswith(self.prefixes) or name.endswith(self.suffixes)


def patterns_of(texts: Iterable[str]) -> Patterns:
    """``*`` stands for any text at the beginning or the end of one."""
    given = set(texts)
    return Patterns(
        exact=frozenset(one for one in given if "*" not in one),
        prefixes=tuple(sorted(one[:-1] for one in given if len(one) > 1 and one.endswith("*"))),
        suffixes=tuple(sorted(one[1:] for one in given if len(one) > 1 and one.startswith("*"))),
        is_anything="*" in given,
    )
