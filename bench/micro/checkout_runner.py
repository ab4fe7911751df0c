# SPDX-License-Identifier: Apache-2.0
"""Run the extproc of any checkout: ``python -m bench.micro.checkout_runner DIR [--samples FILE] ARGS``.

``--samples`` waits for SIGUSR2, from then on takes a sample of the main thread's Python stack after every 4 ms of its
processor time, and writes them to FILE at the end, in the format of flame graphs: functions from the outermost
inwards, then how often. What C code does counts for the Python function that called it; what the event loop and gRPC
do between two calls counts for the function that runs next.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

BEGIN: Final = signal.SIGUSR2
_INTERVAL_S: Final = 0.004


class _Interval(ctypes.Structure):
    """Linux's ``struct itimerspec``: period and first expiry, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("period_s", "period_ns", "first_s", "first_ns")]


class _Event(ctypes.Structure):
    """Linux's ``struct sigevent``; 0 as ``notify`` sends the signal to the process."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    ]


class StackSampler:
    """Counts the stacks that the main thread is in when its processor time has advanced by an interval."""

    def __init__(self) -> None:
        self._stacks: Counter[tuple[str, ...]] = Counter()

    def begin(self, *_: object) -> None:
        """Start the timer of the calling thread, which must be the main one."""
        signal.signal(signal.SIGPROF, self._sample)
        libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
        event = _Event(None, signal.SIGPROF, 0, b"")
        nanoseconds = round(_INTERVAL_S * 1e9)
        interval = _Interval(0, nanoseconds, 0, nanoseconds)
        failed = libc.timer_create(time.CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer))
        if failed or libc.timer_settime(timer, 0, ctypes.byref(interval), None):
            raise OSError(ctypes.get_errno(), "no timer on a thread's processor time")

    def write(self, file: Path) -> None:
        """One line for each stack."""
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        lines = [f"{';'.join(stack)} {count}\n" for stack, count in self._stacks.most_common()]
        file.write_text("".join(lines))

    def _sample(self, _: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}".replace(" ", ""))
            frame = frame.f_back
        self._stacks[tuple(reversed(stack))] += 1


def main() -> int:
    """extproc's exit status."""
    root, *words = sys.argv[1:]
    sys.path.insert(0, root)
    sampler, file = None, None
    if words[:1] == ["--samples"]:
        file, words = Path(words[1]), words[2:]
        sampler = StackSampler()
        signal.signal(BEGIN, sampler.begin)
    try:
        status: int = importlib.import_module("extproc.__main__").main(words)
    finally:
        if sampler is not None and file is not None:
            sampler.write(file)
    return status


if __name__ == "__main__":
    sys.exit(main())
