# SPDX-License-Identifier: Apache-2.0
"""A mistake in configuration: where it stands and what to write instead."""

from __future__ import annotations

import msgspec

# Where in a document: ("spec", "rules", 0, "name").
Path = tuple[str | int, ...]
# What a check finds, before it is known in which file and on which line that stands.
Finding = tuple[Path, str]


class Mistake(msgspec.Struct, frozen=True, order=True):
    """Something wrong in a file. ``line`` counts from 1; 0 means the file as a whole."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        """``routes.yaml:12: spec.rules[0].name: message``."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class ConfigInvalid(Exception):
    """A configuration directory that cannot be used. ``mistakes`` are all that were found, in file order."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = sorted(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


def to_text(path: Path) -> str:
    """``("spec", "rules", 0, "name")`` as ``spec.rules[0].name``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
