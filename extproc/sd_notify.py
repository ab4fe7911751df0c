# SPDX-License-Identifier: Apache-2.0
"""Reports of a process to whoever started it, as systemd's services send them (sd_notify): a supervisor, or systemd."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTIFY_VARIABLE: Final = "NOTIFY_SOCKET"
# Microseconds within which a report is due; without it, none is.
WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"
READY: Final = b"READY=1"
STOPPING: Final = b"STOPPING=1"
ALIVE: Final = b"WATCHDOG=1"


def notify(report: bytes, environment: Mapping[str, str]) -> None:
    """Send a report, if ``environment`` asks for reports."""
    address = environment.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as one:
        # @ stands for the zero of an abstract address
        one.sendto(report, "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Within how many seconds the next ALIVE is due; None: never."""
    text = environment.get(WATCHDOG_VARIABLE, "")
    return int(text) / 1e6 if text.isascii() and text.isdigit() and int(text) else None
