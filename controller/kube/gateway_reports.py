# SPDX-License-Identifier: Apache-2.0
"""Reports of gateways: the engines' loads, on request, and their clients' demand, as an open stream.

``loads_by_pod`` and ``DemandFeed`` read gateways' pods; ``DemandStreamMerger`` joins the streams of a pod's extproc
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from controller.kube.api_resources import split_key
from controller.kube.errors import Backoff
from controller.kube.pod_http import read_page
from extproc.api.addresses import join_host_port
from extproc.api.status_page_contents import (
    DEMAND_PATH,
    LOADS_LABEL,
    LOADS_PATH,
    EndpointLoad,
    ProcessDemand,
    apply_demand_delta,
    demand_delta,
    total_loads,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
    from random import Random

    from controller.kube.api_resources import Object

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 4_000_000
_LOADS_DECODER: Final = msgspec.json.Decoder(dict[str, EndpointLoad])
Loads = dict[str, EndpointLoad]
# Gateways send a line once a second.
IDLE_S: Final = 3.0
# A process without a line for so long does not answer: readers get a line about it before they time out.
_SILENT_S: Final = IDLE_S / 2
_CONNECT_S: Final = 2.0
# Five hundred ModelServers of a hundred engines each.
_LONGEST_LINE: Final = 16_000_000
# Of an untrusted gateway: the last lines of all processes of its pod together.
_LONGEST_OWN_LINE: Final = 1_000_000
# Its next line is read so long after one of that length; none is read sooner than the other time.
_OWN_LINE_S: Final = 1.0
_SHORTEST_OWN_S: Final = 0.02
FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 5.0
# Untrusted gateways of a namespace: any pod can carry the label.
_MOST_OWN: Final = 32
# Without news of pods; a safety net.
_RETRY_S: Final = 30.0
# Processes of a pod in a stream.
_MOST_SLOTS: Final = 64
_DEMAND_DECODER: Final = msgspec.json.Decoder(ProcessDemand)


async def read_loads(http: aiohttp.ClientSession, addresses: Iterable[str]) -> Loads | None:
    """The sum of the pages at ``addresses`` (``ip:port``); None if one of them does not answer: the missing requests
    may be there.
    """
    pages = await asyncio.gather(*(_read(http, one) for one in addresses))
    found = [one for one in pages if one is not None]
    return total_loads(found) if len(found) == len(pages) else None


async def loads_by_pod(
    http: aiohttp.ClientSession, gateways: Iterable[Object], pods: Mapping[str, Object]
) -> dict[str, EndpointLoad]:
    """By key of ``pods``. ``gateways``: the pods with the label ``attache.dev/tells-loads``.

    A pod on no gateway's page has nothing in flight. Empty if a gateway does not answer, as loads are then unknown.
    """
    known = await read_loads(http, [one for one in map(reports_address, gateways) if one])
    if known is None:
        return {}
    by_ip: dict[str, EndpointLoad] = {}
    for address, load in known.items():
        ip = address.rpartition(":")[0].strip("[]")
        before = by_ip.get(ip, EndpointLoad())  # data-parallel ranks of a pod have a port each
        by_ip[ip] = EndpointLoad(
            before.in_flight + load.in_flight,
            before.cached_tokens + load.cached_tokens,
            before.reported + load.reported,
        )
    return {key: by_ip.get((pod.get("status") or {}).get("podIP", ""), EndpointLoad()) for key, pod in pods.items()}


def is_gateway_running(pod: Object) -> bool:
    """Whether a gateway's pod runs: one that has not started yet, or has ended, has no requests in flight."""
    return (pod.get("status") or {}).get("phase") == "Running"


def reports_address(pod: Object) -> str:
    """The address of a gateway pod's reports; empty while it does not run."""
    status, port = pod.get("status") or {}, (pod["metadata"].get("labels") or {}).get(LOADS_LABEL, "")
    ip = status.get("podIP")
    if not ip or not is_gateway_running(pod) or not port.isdecimal():
        return ""
    return join_host_port(ip, port)


async def _read(http: aiohttp.ClientSession, address: str) -> Loads | None:
    url = f"http://{address}{LOADS_PATH}"
    return await read_page(http, url, _LOADS_DECODER, timeout_s=_TIMEOUT_S, most_bytes=_MAX_BYTES)


class DemandStreamInvalid(Exception):
    """The response is not a stream of messages."""


# How a stream ends.
BROKEN: Final = (TimeoutError, aiohttp.ClientError, OSError, DemandStreamInvalid)


async def stream_demand_reports(
    http: aiohttp.ClientSession, address: str, *, is_trusted: bool = True
) -> AsyncGenerator[ProcessDemand]:
    """Demand reports from ``address`` (``ip:port``). Lines may have changed servers alone; messages have all, and
    unchanged ones are the same objects as in the message before.

    A gateway that is not trusted sends all in each line, has a lower limit of bytes, and is read slowly.

    Raises TimeoutError, ClientError or BadStream when the stream ends, breaks, or is idle too long.
    """
    url = f"http://{address}{DEMAND_PATH}?watch{'=changes' if is_trusted else ''}"
    timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)
    async with asyncio.timeout(IDLE_S):
        # nothing small that becomes large
        answer = await http.get(url, timeout=timeout, allow_redirects=False, headers={"Accept-Encoding": "identity"})
    async with answer:
        if answer.status != HTTPStatus.OK or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise DemandStreamInvalid(f"the answer is {answer.status} {answer.reason}, or compressed")
        rest = bytearray()
        state = _StreamState(is_trusted=is_trusted)
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await _read_line(answer.content, rest, state.longest)
            yield state.message(line)
            if not is_trusted:
                await asyncio.sleep(max(_SHORTEST_OWN_S, _OWN_LINE_S * len(line) / _LONGEST_OWN_LINE))


class _StreamState:
    """The last message of each process on a stream. ``longest``: limit of a line in bytes."""

    def __init__(self, *, is_trusted: bool) -> None:
        self.longest = _LONGEST_LINE if is_trusted else _LONGEST_OWN_LINE
        self._is_trusted = is_trusted
        self._last: dict[str, ProcessDemand] = {}
        self._bytes: dict[str, int] = {}

    def message(self, line: bytes) -> ProcessDemand:
        """From the next line; raises BadStream."""
        try:
            said = _DEMAND_DECODER.decode(line)
        except (ValueError, RecursionError) as error:  # the decoder's error is a ValueError
            raise DemandStreamInvalid(f"a line is no message: {error}") from None
        whole = apply_demand_delta(said, self._last.get(said.slot) if self._is_trusted else None)
        if whole is None:
            raise DemandStreamInvalid("a line does not go on from the one before")
        # a process that does not answer has no servers in its line
        if whole.instance:
            if whole.slot not in self._last and len(self._last) >= _MOST_SLOTS:
                raise DemandStreamInvalid(f"it tells of more than {_MOST_SLOTS} processes")
            self._last[whole.slot], self._bytes[whole.slot] = whole, len(line)
            if not self._is_trusted and sum(self._bytes.values()) > self.longest:
                raise DemandStreamInvalid(f"its processes together tell more than {self.longest} bytes")
        return whole


async def _read_line(content: aiohttp.StreamReader, rest: bytearray, longest: int) -> bytes:
    """The next line. ``rest``: bytes read beyond the line before; afterwards, those read beyond this one."""
    searched = 0
    while (end := rest.find(b"\n", searched)) < 0:
        searched = len(rest)
        if searched > longest:
            raise DemandStreamInvalid(f"a line is longer than {longest} bytes")
        chunk = await content.readany()
        if not chunk:
            raise DemandStreamInvalid("the stream has ended")
        rest += chunk
    line = bytes(rest[:end])
    del rest[: end + 1]
    return line


class DemandFeed:
    """``run`` reads the streams of all gateways; ``on_demand`` is called with each message.

    Of gateways outside of the ``trusted`` namespaces, only a few in each namespace are read.
    """

    def __init__(
        self,
        gateways: Callable[[], Mapping[str, Object]],
        on_demand: Callable[[str, ProcessDemand, float], None],
        *,
        clock: Callable[[], float],
        rng: Random,
        trusted: Collection[str] = (),
    ) -> None:
        """``gateways``: the pods with the label ``attache.dev/tells-loads``, by key; call ``on_gateways_changed``
        when they change.
        """
        self._gateways = gateways
        self._on_demand = on_demand
        self._clock = clock
        self._rng = rng
        self._trusted = trusted
        self._news = asyncio.Event()
        # by key and address
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def gateway_addresses(self) -> dict[str, str]:
        """Address of each running gateway by key, those that are not read included."""
        return {key: address for key, pod in self._gateways().items() if (address := reports_address(pod))}

    def on_gateways_changed(self, _key: str = "") -> None:
        """A gateway may have been added, changed or removed."""
        self._news.set()

    async def run(self) -> None:
        """Read streams until cancelled. No failure of a gateway or of the network ends it."""
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
                    async with asyncio.timeout(_RETRY_S):
                        await self._news.wait()

    def _chosen(self) -> dict[str, str]:
        found: dict[str, str] = {}
        own: dict[str, int] = {}
        for key, address in sorted(self.gateway_addresses().items()):
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
                async with contextlib.aclosing(
                    stream_demand_reports(http, address, is_trusted=self._trusts(key))
                ) as stream:
                    async for message in stream:
                        if not has_spoken:
                            log.info("gateway %s says again what its clients ask for", key)
                        has_spoken = True
                        backoff.reset()
                        self._on_demand(key, message, self._clock())
            except BROKEN as error:
                if has_spoken:
                    log.warning(
                        "gateway %s does not say what its clients ask for: %s", key, str(error) or "it is silent"
                    )
                has_spoken = False
            except Exception:  # whatever is wrong with one gateway, the others are followed
                log.exception("gateway %s says what nobody can read", key)
            await asyncio.sleep(backoff.record_failure())


class DemandStreamMerger:
    """The demand reports of the processes of one pod for one reader: each process has a slot of its own.

    Messages are sums, so of two unread ones of a process the older is dropped.
    """

    def __init__(self, http: aiohttp.ClientSession, addresses: Collection[str]) -> None:
        """``addresses``: where the processes have their pages."""
        self._http = http
        self._addresses = addresses
        self._latest: dict[str, ProcessDemand] = {}
        self._news = asyncio.Event()

    async def lines(self, *, changes: bool = False) -> AsyncGenerator[bytes]:
        """Lines as they arrive; for a process that does not answer, a line without counts once a second. ``changes``:
        without unchanged servers.
        """
        sent: dict[str, ProcessDemand] = {}
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
                        before, sent[address] = sent.get(address), said
                        said_at_s[address] = now
                        yield _encoded(demand_delta(said, before) if changes and before is not None else said)
                    elif now - said_at_s[address] >= _SILENT_S:
                        said_at_s[address] = now
                        yield _encoded(_silent(address))
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def read_once(self) -> bytes:
        """A line of each process."""
        return b"".join(await asyncio.gather(*(self._first(one) for one in self._addresses)))

    async def _first(self, address: str) -> bytes:
        with contextlib.suppress(*BROKEN):
            async with contextlib.aclosing(stream_demand_reports(self._http, address)) as stream:
                async for said in stream:
                    return _encoded(_with_slot(address, said))
        return _encoded(_silent(address))

    async def _follow(self, address: str) -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with contextlib.aclosing(stream_demand_reports(self._http, address)) as stream:
                    async for said in stream:
                        self._latest[address] = _with_slot(address, said)
                        self._news.set()
            # on the same machine, so it is polled often
            await asyncio.sleep(FIRST_WAIT_S)


def _with_slot(slot: str, said: ProcessDemand) -> ProcessDemand:
    """A message that names no slot, with one."""
    return msgspec.structs.replace(said, slot=slot)


def _silent(slot: str) -> ProcessDemand:
    return ProcessDemand("", 0, 0.0, slot=slot)


def _encoded(said: ProcessDemand) -> bytes:
    return msgspec.json.encode(said) + b"\n"
