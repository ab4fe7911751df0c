# SPDX-License-Identifier: Apache-2.0
"""Logs what our own code raises: each kind once with its traceback, then a count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging

# Kinds told apart. All further ones are counted together.
_MOST_KINDS: Final = 256
_OTHERS: Final = ("", "other kinds", "", 0)


class FailureLog:
    """A client that makes us fail at will must not fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: dict[tuple[str, str, str, int], int] = {}

    def note(self, what: str, error: BaseException) -> None:
        """Count ``error``; the first of its kind is logged whole, then each tenfold count in one line."""
        kind = (what, *_kind_of(error))
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _OTHERS
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            self._log.error("%s (only the first of its kind is logged like this)", what, exc_info=error)
        elif str(count).strip("0") == "1":
            self._log.error("%s: %d times so far by %s in %s:%d", what, count, *kind[1:])


def _kind_of(error: BaseException) -> tuple[str, str, int]:
    """The exception's type, and the place that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error).__name__, "" if at is None else at.tb_frame.f_code.co_filename, 0 if at is None else at.tb_lineno
