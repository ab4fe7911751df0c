# SPDX-License-Identifier: Apache-2.0
"""Values made of files that change while a process runs: the last good one stays in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C")
T = TypeVar("T")


class Reloadable(Generic[C, T]):
    """A value made of files, which ``poll`` reads again. ``value``: made of the last good content. ``problem``: why the
    present content cannot be used, empty if it can.

    Files that are replaced one after the other do not fit each other for a moment. Content that was refused is not made
    into a value again before it changes.
    """

    def __init__(self, read: Callable[[], C], make: Callable[[C], T], fallback: T | None = None) -> None:
        """``read`` and ``make`` raise OSError or ValueError; so does this, unless there is a ``fallback``."""
        self._read = read
        self._make = make
        # read last, and that of ``value``; None: nothing could be read
        self._seen: C | None = None
        self._good: C | None = None
        self.problem = ""
        try:
            self._seen = read()
            self.value = make(self._seen)
            self._good = self._seen
        except (OSError, ValueError) as error:
            if fallback is None:
                raise
            self.value, self.problem = fallback, error_text(error)

    def poll(self) -> Literal["unchanged", "new", "mended", "refused"]:
        """Read again. ``mended``: the content is again that of ``value``. ``refused``: with another ``problem``."""
        try:
            content = self._read()
            if content == self._seen:
                return "unchanged"
            self._seen = content
            if content == self._good:
                self.problem = ""
                return "mended"
            self.value = self._make(content)
        except (OSError, ValueError) as error:
            known, self.problem = self.problem, error_text(error)
            if isinstance(error, OSError):
                self._seen = None
            return "unchanged" if self.problem == known else "refused"
        self._good, self.problem = content, ""
        return "new"


def error_text(error: OSError | ValueError) -> str:
    """For people: an OSError without its number."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
