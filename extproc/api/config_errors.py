# SPDX-License-Identifier: Apache-2.0
"""A mistake in configuration: where it stands and what to write instead."""

from __future__ import annotations

from typing import Final

import msgspec

# Of all mistakes, and characters of each, in what people are shown.
_MAX_SHOWN: Final = 100
_MAX_CHARACTERS: Final = 2000

# Where in a document: ("spec", "rules", 0, "name").
Path = tuple[str | int, ...]
# A mistake that a check finds, before its file and line are determined.
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
        message = f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"
        return one_line(message)


class ConfigInvalid(Exception):
    """A configuration directory that cannot be used. ``mistakes`` are all that were found, in file order."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = sorted(mistakes)
        lines = [str(mistake) for mistake in self.mistakes[:_MAX_SHOWN]]
        if len(self.mistakes) > _MAX_SHOWN:
            lines.append(f"and {len(self.mistakes) - _MAX_SHOWN} more")
        super().__init__("\n".join(lines))


def format_path(path: Path) -> str:
    """``("spec", "rules", 0, "name")`` as ``spec.rules[0].name``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def one_line(text: str) -> str:
    """Names and values come from files: nothing of them may look like another line of a log or steer a terminal."""
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}..."
    return escape_unprintable(text)


def escape_unprintable(text: str) -> str:
    """One line without terminal control characters, of a text that somebody else has chosen; each can be read back."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def replace_unprintable(text: str, *, keep: str = "") -> str:
    """Likewise, with U+FFFD in place of each of them but those in ``keep``."""
    return "".join([one if one.isprintable() or one in keep else "\N{REPLACEMENT CHARACTER}" for one in text])
