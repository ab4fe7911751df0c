# SPDX-License-Identifier: Apache-2.0
"""Logs of every command: lines of text, or JSON objects, one a line. No value that is logged can forge a line.

Fields of a line are the ``extra`` of a call: ``log.warning("engine is avoided", extra={"engine": key})``. A thread of
its own writes them: whoever logs never waits for a reader of standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from logging.handlers import QueueHandler
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
# What a request or an object brings into a line: clients and users of a cluster choose its length.
_MOST_CHARACTERS: Final = 16_384
# A traceback has its cause at its end.
_MOST_TRACEBACK: Final = 65_536
_MOST_FIELDS: Final = 64
_MOST_WAITING: Final = 1024
_END_S: Final = 2.0
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Attributes that every record has: all others are fields.
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def one_line(text: str) -> str:
    """``text`` with escapes for ends of lines and whatever else does not print; cut after 16,384 characters."""
    return _escaped(_cut(text))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class TextFormatter(logging.Formatter):
    """``TIME LEVEL LOGGER: MESSAGE FIELD=VALUE``; the lines of a traceback follow, indented."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, without a traceback."""
        record.message = " ".join(
            [
                one_line(record.message),
                *(f"{name}={one_line(str(value))}" for name, value in extra_fields(record).items()),
            ]
        )
        return super().formatMessage(record)

    def formatException(  # noqa: N802 - logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Its lines are indented: the message of an exception cannot look like a line of the log."""
        lines = super().formatException(ei)[-_MOST_TRACEBACK:].splitlines()
        return "\n".join(f"    {_escaped(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", "fields", "exception"}``; the last two only where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII in one line: characters that some readers take for an end of line are escaped."""
        seconds, milliseconds = int(record.created), int(record.msecs)
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        fields = extra_fields(record)
        if fields:
            line["fields"] = {name: _plain(value) for name, value in fields.items()}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)[-_MOST_TRACEBACK:]
        return json.dumps(line)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the call gave as ``extra``, and no more than 64 of it."""
    found = [(name, value) for name, value in vars(record).items() if name not in _OWN]
    return dict(found[:_MOST_FIELDS])


def _plain(value: object) -> object:
    """As JSON has it. Numbers that JSON lacks, and everything else, are text."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and abs(value) < float("inf")):
        return value
    return _cut(str(value))


def _cut(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]}... ({more} characters more)"


class BackgroundHandler(QueueHandler):
    """Lines wait for a thread that writes them, at most 1,024; others are lost, and counted in a line of their own.

    At the end of the process it has two seconds to write those that wait.
    """

    def __init__(self, descriptor: int) -> None:
        self._lines: Queue[logging.LogRecord | None] = Queue(_MOST_WAITING)
        super().__init__(self._lines)
        self._descriptor = descriptor
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self._lines.put_nowait(record)
        except Full:
            self._lost += 1

    def close(self) -> None:
        """Called by ``logging`` at the end of the process."""
        super().close()
        with suppress(Full):
            self._lines.put(None, timeout=_END_S)
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (record := self._lines.get()) is not None:
            # as this handler has formatted it
            self._write(record.getMessage())
            if self._lost and self._lines.empty():
                lost, self._lost = self._lost, 0
                self._write(self._lost_line(lost))

    def _lost_line(self, lost: int) -> str:
        """Made without the logger: the end of the process holds this handler's lock while it waits for the thread."""
        text = f"{lost} lines of this log are lost: nobody read them as fast as they came"
        level = {"levelno": logging.WARNING, "levelname": "WARNING"}
        record = logging.makeLogRecord({"name": __name__, "msg": text, **level})
        self.filter(record)
        return self.format(record)

    def _write(self, line: str) -> None:
        rest = f"{line}\n".encode(errors="backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # whom could it be told?
            self._lost += 1


_FORMATTERS: Final[dict[str, type[logging.Formatter]]] = {"text": TextFormatter, "json": JsonFormatter}


def add_log_options(made: argparse.ArgumentParser) -> None:
    """``--log-format`` and ``--log-level``."""
    add = made.add_argument_group("log, on standard error").add_argument
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="lines of text, or a JSON object a line (default: %(default)s)",
    )
    add("--log-level", choices=LEVELS, default="info", help="the lowest level that is logged (default: %(default)s)")


def log_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """The same options for another program of ours."""
    return ("--log-format", options.log_format, "--log-level", options.log_level)


def start_logging(options: argparse.Namespace, **fields: object) -> None:
    """Log to standard error as ``options`` say; in JSON also an exception that ends the process. ``fields``: of every
    line of this process.
    """
    if logging.root.handlers or sys.__stderr__ is None:
        # another program's handlers; or nowhere to write to, as standard error is closed
        return
    handler = BackgroundHandler(sys.__stderr__.fileno())
    handler.setFormatter(_FORMATTERS[options.log_format]())
    handler.addFilter(partial(_add_fields, fields))
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler])
    if options.log_format == "json":
        sys.excepthook = _log_uncaught


def _add_fields(fields: dict[str, object], record: logging.LogRecord) -> bool:
    vars(record).update(fields)
    return True


def _log_uncaught(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, at)
        return
    logging.getLogger("attache").critical("the process ends with an error", exc_info=(kind, error, at))
