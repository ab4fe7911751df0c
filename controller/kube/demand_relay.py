# SPDX-License-Identifier: Apache-2.0
"""What all extproc processes of a pod say of their demand, as one stream of lines for who follows the pod."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from controller.kube.demand import BROKEN, FIRST_WAIT_S, IDLE_S, messages
from extproc.api.demand import Demand, changed_since

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    import aiohttp


class DemandRelay:
    """What the processes of one pod say, for one who follows it: each process has a slot of its own.

    Messages are sums, so of two of a process that wait to be read the older one is left out.
    """

    def __init__(self, http: aiohttp.ClientSession, addresses: Collection[str]) -> None:
        """``addresses``: where the processes have their pages."""
        self._http = http
        self._addresses = addresses
        self._latest: dict[str, Demand] = {}
        self._news = asyncio.Event()

    async def lines(self, *, changes: bool = False) -> AsyncGenerator[bytes]:
        """As they come; of a process that does not answer, once a second that it does not. ``changes``: without servers
        of which nothing new is to be told.
        """
        told: dict[str, Demand] = {}
        following = [asyncio.create_task(self._follow(one), name=f"demand of {one}") for one in self._addresses]
        loop = asyncio.get_running_loop()
        said_at_s = dict.fromkeys(self._addresses, loop.time())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._news.wait()
                self._news.clear()
                latest, self._latest, now = self._latest, {}, loop.time()
                for address in self._addresses:
                    said = latest.get(address)
                    if said is not None:
                        before, told[address] = told.get(address), said
                        said_at_s[address] = now
                        yield _line(changed_since(said, before) if changes and before is not None else said)
                    elif now - said_at_s[address] >= IDLE_S / 2:
                        said_at_s[address] = now
                        yield _line(_silent(address))
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def once(self) -> bytes:
        """A line of each process."""
        return b"".join(await asyncio.gather(*(self._first(one) for one in self._addresses)))

    async def _first(self, address: str) -> bytes:
        with contextlib.suppress(*BROKEN):
            async with contextlib.aclosing(messages(self._http, address)) as stream:
                async for said in stream:
                    return _line(_with_slot(address, said))
        return _line(_silent(address))

    async def _follow(self, address: str) -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with contextlib.aclosing(messages(self._http, address)) as stream:
                    async for said in stream:
                        self._latest[address] = _with_slot(address, said)
                        self._news.set()
            # on the same machine: it is asked often
            await asyncio.sleep(FIRST_WAIT_S)


def _with_slot(slot: str, said: Demand) -> Demand:
    """A message that names no slot, with one."""
    return msgspec.structs.replace(said, slot=slot)


def _silent(slot: str) -> Demand:
    return Demand("", 0, 0.0, slot=slot)


def _line(said: Demand) -> bytes:
    return msgspec.json.encode(said) + b"\n"
