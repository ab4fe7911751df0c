# SPDX-License-Identifier: Apache-2.0
"""Logs what fails: each kind once, with its traceback where our own code failed, then a count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging

# Kinds told apart. All further ones are counted together.
_MOST_KINDS: Final = 256
_OTHERS: Final = ("other kinds", "", 0)


class FailureLog:
    """A client that makes us fail at will must not fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: dict[tuple[str, str, int], int] = {}

    def note(self, what: str, error: Exception, *, is_ours: bool = True) -> None:
        """Count ``error``; the first of its kind is logged whole, then each tenfold count in one line. ``is_ours``: our
        code failed; else its message says enough.
        """
        kind = _kind_of(error)
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _OTHERS
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            what = what if is_ours else f"{what}: {error}"
            self._log.error(
                "%s (only the first of its kind is logged like this)", what, exc_info=error if is_ours else None
            )
        elif str(count).strip("0") == "1":
            self._log.error("%s: %d times so far by %s in %s:%d", what, count, *kind)


def _kind_of(error: Exception) -> tuple[str, str, int]:
    """The exception's type, and the place that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error).__name__, "" if at is None else at.tb_frame.f_code.co_filename, 0 if at is None else at.tb_lineno
