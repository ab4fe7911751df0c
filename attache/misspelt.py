# SPDX-License-Identifier: Apache-2.0
"""What was probably meant by a word that nobody knows."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` if a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def misspelt_option(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """What is wrong with the first long option that ``parser`` does not have; empty if it has them all.

    argparse would first complain of required options that are missing, although one of them may just be misspelt.
    """
    known = parser._option_string_actions  # noqa: SLF001 - argparse has no public way to list options
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("-") and f"-{name}" in known and name not in known:
            return f"there is no option '{name}'; did you mean '-{name}'?"
        # as argparse does, a beginning of an option's name is taken for the option
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            return f"there is no option '{name}'{suggestion(name, known)}"
    return ""
