# SPDX-License-Identifier: Apache-2.0
"""What our own code raises: logged once of each kind, then counted; a feed that ends by it is started again."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

# Kinds told apart. All further ones are counted together.
_MOST_KINDS: Final = 256
_OTHERS: Final = ("", "other kinds", "", 0)
# Before a feed is started again; after a failure soon after the last one, twice as long as then.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0


class FailureLog:
    """A client that makes us fail at will must not fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: dict[tuple[str, str, str, int], int] = {}

    def note(self, what: str, error: BaseException, *, is_ours: bool = True) -> None:
        """Count ``error``; the first of its kind is logged whole, then each tenfold count in one line. ``is_ours``: our
        code failed; else its message says enough.
        """
        kind = (what, *_kind_of(error))
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _OTHERS
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            what = what if is_ours else f"{what}: {error}"
            self._log.error(
                "%s (only the first of its kind is logged like this)", what, exc_info=error if is_ours else None
            )
        elif str(count).strip("0") == "1":
            self._log.error("%s: %d times so far by %s in %s:%d", what, count, *kind[1:])


class Supervisor:
    """Runs what feeds the process beside its requests. A feed that fails ends nothing else: it is started again."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        """``failed``: called with the name of each feed that has failed."""
        self._failed = failed

    async def run(self, feed: str, start: Callable[[], Awaitable[None]], *, of: str = "") -> None:
        """Run ``start()`` until it returns, or until cancelled. Raises nothing else.

        ``feed``: its name in logs and metrics. ``of``: whose it is where there are several, for the log.
        """
        name = f"{feed} of {of}" if of else feed
        loop, task, pause_s = asyncio.get_running_loop(), asyncio.current_task(), _FIRST_PAUSE_S
        failures = FailureLog(log)
        while True:
            began_s = loop.time()
            try:
                await start()
            except Exception as error:  # noqa: BLE001 - what a feed raises must end nothing else
                self._failed(feed)
                failures.note(f"the feed {name} has failed and is started again", _cause(error))
            else:
                return
            if task is not None and task.cancelling():
                # client libraries turn some cancellations into errors of their own
                raise asyncio.CancelledError
            if loop.time() - began_s > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _cause(error: Exception) -> Exception:
    """What failed first in a group of tasks, if it was one of them."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind_of(error: BaseException) -> tuple[str, str, int]:
    """The exception's type, and the place that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error).__name__, "" if at is None else at.tb_frame.f_code.co_filename, 0 if at is None else at.tb_lineno
