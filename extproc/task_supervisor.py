# SPDX-License-Identifier: Apache-2.0
"""Exceptions of our own code: logged once of each kind, then counted; a feed that they end is started again."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

# Kinds that are counted separately. All further ones are counted together.
_MOST_KINDS: Final = 256
_OTHERS: Final = ("", "other kinds", "", 0)
# Before a feed is started again; after a failure soon after the last one, twice as long as then.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0


class Backoff:
    """The pauses after failures in a row: ``first_s``, then twice as long each, at most ``most_s``."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._pause_s = 0.0

    @property
    def pause_s(self) -> float:
        """After the last failure; 0 if none came since ``reset``."""
        return self._pause_s

    def record_failure(self) -> float:
        """How long to wait before the next attempt."""
        self._pause_s = min(self._most_s, max(self._first_s, 2 * self._pause_s))
        return self._pause_s

    def reset(self) -> None:
        """The next failure is the first of its row."""
        self._pause_s = 0.0


class FailureLog:
    """Logs failures in bounded space: a client that causes failures at will must not fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: dict[tuple[str, str, str, int], int] = {}

    def record(self, what: str, error: BaseException, *, is_ours: bool = True) -> None:
        """Count ``error``; the first of its kind is logged whole, then each tenfold count in one line. ``is_ours``: our
        code failed; else its message is logged without a traceback.
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

        ``feed``: its name in logs and metrics. ``of``: the feed's owner where there are several, for the log.
        """
        name = f"{feed} of {of}" if of else feed
        loop, task, backoff = (
            asyncio.get_running_loop(),
            asyncio.current_task(),
            Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
        )
        failures = FailureLog(log)
        while True:
            began_s = loop.time()
            try:
                await start()
            except Exception as error:  # noqa: BLE001 - what a feed raises must end nothing else
                self._failed(feed)
                failures.record(f"the feed {name} has failed and is started again", _cause(error))
            else:
                return
            if task is not None and task.cancelling():
                # client libraries turn some cancellations into errors of their own
                raise asyncio.CancelledError
            if loop.time() - began_s > _LONGEST_PAUSE_S:
                backoff.reset()
            await asyncio.sleep(backoff.record_failure())


def _cause(error: Exception) -> Exception:
    """The first error of a group of tasks, if a task raised it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind_of(error: BaseException) -> tuple[str, str, int]:
    """The exception's type, and the place that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error).__name__, "" if at is None else at.tb_frame.f_code.co_filename, 0 if at is None else at.tb_lineno
