# SPDX-License-Identifier: Apache-2.0
"""Follows what gateways say of their demand: one open stream to each, opened anew when it breaks or says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from controller.kube.backoff import Backoff
from controller.kube.loads import teller
from controller.kube.resources import split_key
from extproc.api.demand import DEMAND_PATH, Demand, completed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping
    from random import Random

    from controller.kube.resources import Object

log = logging.getLogger(__name__)


# Gateways say something once a second.
IDLE_S: Final = 3.0
_CONNECT_S: Final = 2.0
# Five hundred ModelServers of a hundred engines each.
_LONGEST_LINE: Final = 16_000_000
# Of a gateway that nobody vouches for: what all processes of its pod said last, together.
_LONGEST_OWN_LINE: Final = 1_000_000
# Its next line is read so long after one of that length; none is read sooner than the other time.
_OWN_LINE_S: Final = 1.0
_SHORTEST_OWN_S: Final = 0.02
FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 5.0
# Gateways of a namespace that nobody vouches for: anybody may put the label on a pod.
_MOST_OWN: Final = 32
# Without news of pods; a safety net.
_LOOK_AGAIN_S: Final = 30.0
# Processes of a pod that a stream tells of.
_MOST_SLOTS: Final = 64
_DECODER: Final = msgspec.json.Decoder(Demand)


class BadStream(Exception):
    """What came is not a stream of messages."""


# How a stream ends.
BROKEN: Final = (TimeoutError, aiohttp.ClientError, OSError, BadStream)


async def messages(http: aiohttp.ClientSession, address: str, *, is_trusted: bool = True) -> AsyncGenerator[Demand]:
    """What is said at ``address`` (``ip:port``). Lines may name changed servers alone; messages name all, and those of
    which nothing new was said are the same objects as in the message before.

    One that is not trusted tells all in each line, tells little, and is read slowly.

    Raises TimeoutError, ClientError or BadStream when it ends, breaks, or says nothing for a while.
    """
    url = f"http://{address}{DEMAND_PATH}?watch{'=changes' if is_trusted else ''}"
    timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)
    async with asyncio.timeout(IDLE_S):
        # nothing small that becomes large
        answer = await http.get(url, timeout=timeout, allow_redirects=False, headers={"Accept-Encoding": "identity"})
    async with answer:
        if answer.status != HTTPStatus.OK or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise BadStream(f"the answer is {answer.status} {answer.reason}, or compressed")
        rest = bytearray()
        told = _Told(is_trusted=is_trusted)
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await _line(answer.content, rest, told.longest)
            yield told.message(line)
            if not is_trusted:
                await asyncio.sleep(max(_SHORTEST_OWN_S, _OWN_LINE_S * len(line) / _LONGEST_OWN_LINE))


class _Told:
    """The last message of each process on a stream. ``longest``: bytes that a line may have."""

    def __init__(self, *, is_trusted: bool) -> None:
        self.longest = _LONGEST_LINE if is_trusted else _LONGEST_OWN_LINE
        self._is_trusted = is_trusted
        self._last: dict[str, Demand] = {}
        self._bytes: dict[str, int] = {}

    def message(self, line: bytes) -> Demand:
        """From the next line; raises BadStream."""
        try:
            said = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:  # the decoder's error is a ValueError
            raise BadStream(f"a line is no message: {error}") from None
        whole = completed(said, self._last.get(said.slot) if self._is_trusted else None)
        if whole is None:
            raise BadStream("a line does not go on from the one before")
        # that a process does not answer says nothing of its servers
        if whole.instance:
            if whole.slot not in self._last and len(self._last) >= _MOST_SLOTS:
                raise BadStream(f"it tells of more than {_MOST_SLOTS} processes")
            self._last[whole.slot], self._bytes[whole.slot] = whole, len(line)
            if not self._is_trusted and sum(self._bytes.values()) > self.longest:
                raise BadStream(f"its processes together tell more than {self.longest} bytes")
        return whole


async def _line(content: aiohttp.StreamReader, rest: bytearray, longest: int) -> bytes:
    """The next line. ``rest``: what was read beyond the one before, and is then what was read beyond this one."""
    searched = 0
    while (end := rest.find(b"\n", searched)) < 0:
        searched = len(rest)
        if searched > longest:
            raise BadStream(f"a line is longer than {longest} bytes")
        chunk = await content.readany()
        if not chunk:
            raise BadStream("the stream has ended")
        rest += chunk
    line = bytes(rest[:end])
    del rest[: end + 1]
    return line


class DemandFeed:
    """``run`` follows; ``hear`` gets each message as soon as it is there.

    A gateway outside of the ``trusted`` namespaces is followed while its namespace has few of them.
    """

    def __init__(
        self,
        gateways: Callable[[], Mapping[str, Object]],
        hear: Callable[[str, Demand, float], None],
        *,
        clock: Callable[[], float],
        rng: Random,
        trusted: Collection[str] = (),
    ) -> None:
        """``gateways``: the pods with the label ``attache.dev/tells-loads``, by key; call ``look`` when they change."""
        self._gateways = gateways
        self._hear = hear
        self._clock = clock
        self._rng = rng
        self._trusted = trusted
        self._news = asyncio.Event()
        # by key and address
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def present(self) -> dict[str, str]:
        """Where each gateway that runs is asked, by key: all of them, those that are not followed included."""
        return {key: address for key, pod in self._gateways().items() if (address := teller(pod))}

    def look(self, _key: str = "") -> None:
        """A gateway may have come, changed or gone."""
        self._news.set()

    async def run(self) -> None:
        """Follow until cancelled. No failure of a gateway or of the network ends it."""
        # as many connections as there are gateways
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                wanted = {*self._chosen().items()}
                for one in [one for one in self._tasks if one not in wanted]:
                    self._tasks.pop(one).cancel()
                for one in wanted - self._tasks.keys():
                    self._tasks[one] = tasks.create_task(self._follow(http, *one), name=f"demand of {one[0]}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._news.wait()

    def _chosen(self) -> dict[str, str]:
        found: dict[str, str] = {}
        own: dict[str, int] = {}
        for key, address in sorted(self.present().items()):
            namespace = split_key(key)[0] or ""
            if not self._trusts(key):
                own[namespace] = own.get(namespace, 0) + 1
                if own[namespace] > _MOST_OWN:
                    continue
            found[key] = address
        return found

    def _trusts(self, key: str) -> bool:
        return split_key(key)[0] in self._trusted

    async def _follow(self, http: aiohttp.ClientSession, key: str, address: str) -> None:
        backoff = Backoff(FIRST_WAIT_S, _LONGEST_WAIT_S, self._rng)
        has_spoken = True
        while True:
            try:
                async with contextlib.aclosing(messages(http, address, is_trusted=self._trusts(key))) as stream:
                    async for message in stream:
                        if not has_spoken:
                            log.info("gateway %s says again what its clients ask for", key)
                        has_spoken = True
                        backoff.succeeded()
                        self._hear(key, message, self._clock())
            except BROKEN as error:
                if has_spoken:
                    log.warning(
                        "gateway %s does not say what its clients ask for: %s", key, str(error) or "it is silent"
                    )
                has_spoken = False
            except Exception:  # whatever is wrong with one gateway, the others are followed
                log.exception("gateway %s says what nobody can read", key)
            await asyncio.sleep(backoff.failed())
