# SPDX-License-Identifier: Apache-2.0
"""Asks extproc and the bundle's writer, beside whom the role runs, what of the directory they use."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from controller.gateway.compile.programmed import Follower
from extproc.api.addresses import parse_address
from extproc.api.status_pages import REPORT_PATH, ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 1.0
_SOON_S: Final = 0.3
_LATER_S: Final = 5.0
_MAX_BYTES: Final = 4_000_000


class InUse:
    """``run`` asks ``addresses`` (by the name of who listens there) and calls ``on_change`` when an answer is another
    one.
    """

    def __init__(self, addresses: Mapping[str, str], on_change: Callable[[], None]) -> None:
        self._addresses = addresses
        self._on_change = on_change
        self._reports: dict[str, ConfigReport | None] = dict.fromkeys(addresses)
        self._wake = asyncio.Event()
        self.is_settled = False

    @property
    def followers(self) -> Sequence[Follower]:
        """Those who were asked, with their last answers."""
        return [Follower(name, report) for name, report in self._reports.items()]

    def ask_soon(self) -> None:
        """Something has been written."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        if not self._addresses:
            return
        while True:
            self._wake.clear()
            answers = await asyncio.gather(
                *(asyncio.to_thread(read_report, address) for address in self._addresses.values())
            )
            reports = dict(zip(self._addresses, answers, strict=True))
            if reports != self._reports:
                self._reports = reports
                self._on_change()
            if self.is_settled:
                # not wait_for, which in Python 3.11 loses a cancellation that comes together with what it waits for
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LATER_S):
                        await self._wake.wait()
            await asyncio.sleep(_SOON_S)


def read_report(address: str) -> ConfigReport | None:
    """The report of who listens at ``address``; None if nobody does, or it is no report."""
    host, port = parse_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", REPORT_PATH)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            return None
        return msgspec.json.decode(answer.read(_MAX_BYTES), type=ConfigReport)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):  # the decoder's error is a ValueError
        return None
    finally:
        connection.close()
