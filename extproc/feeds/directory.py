# SPDX-License-Identifier: Apache-2.0
"""Applies changes of the configuration directory; the last good configuration stays in use.

New engines are used once Envoy's admin interface lists them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from extproc.api.addresses import parse_address
from extproc.api.errors import ConfigInvalid
from extproc.api.make_before_break import DrainingRoutedServers, WarmingEngines
from extproc.api.status_pages import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from extproc.api.load import Directory
    from extproc.api.snapshot import Snapshot
    from extproc.core.core import Core
    from extproc.metrics.registry import Metrics

# While Envoy reads a bundle of thousands of routes it answers nobody for seconds.
_TIMEOUT_S: Final = 5.0
# Ten thousand engines have some 10 MB.
_MOST_BYTES: Final = 64 * 2**20
_DUMP: Final = "/config_dump"
# The bundle's clusters of ModelServers.
_PREFIX: Final = "server/"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where another process listens


class _SocketAddress(msgspec.Struct, frozen=True):
    address: str = ""
    port_value: int = 0


class _Address(msgspec.Struct, frozen=True):
    socket_address: _SocketAddress = _SocketAddress()


class _Endpoint(msgspec.Struct, frozen=True):
    address: _Address = _Address()


class _LbEndpoint(msgspec.Struct, frozen=True):
    endpoint: _Endpoint = _Endpoint()


class _Locality(msgspec.Struct, frozen=True):
    lb_endpoints: list[_LbEndpoint] = []


class _Assignment(msgspec.Struct, frozen=True):
    cluster_name: str = ""
    endpoints: list[_Locality] = []


class _Config(msgspec.Struct, frozen=True):
    endpoint_config: _Assignment = _Assignment()


class _Dump(msgspec.Struct, frozen=True):
    configs: list[_Config] = []


async def endpoints_in_envoy(admin: str, servers: Collection[str]) -> Mapping[str, Collection[tuple[str, int]]] | None:
    """IP address and port of engines by ModelServer (``namespace/name``), without servers that it has no cluster for.

    ``admin``: the address of the interface. None if no Envoy answers there.
    """
    host, port = parse_address(admin)
    host = _ANY.get(host, host)
    place = f"[{host}]" if ":" in host else host
    names = "|".join(re.escape(one) for one in sorted(servers))
    query = {"resource": "dynamic_endpoint_configs", "include_eds": "", "name_regex": f"{_PREFIX}({names})"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"http://{place}:{port}{_DUMP}", params=query, allow_redirects=False) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                return None
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > _MOST_BYTES:
                    return None
            dump = msgspec.json.decode(body, type=_Dump)
    except (OSError, aiohttp.ClientError, ValueError, RecursionError):  # the decoder's error is a ValueError
        return None
    return {
        one.endpoint_config.cluster_name.removeprefix(_PREFIX): frozenset(_addresses(one.endpoint_config))
        for one in dump.configs
    }


def _addresses(assignment: _Assignment) -> Iterator[tuple[str, int]]:
    for locality in assignment.endpoints:
        for one in locality.lb_endpoints:
            yield one.endpoint.address.socket_address.address, one.endpoint.address.socket_address.port_value


log = logging.getLogger(__name__)
# Polling works on every file system, mounted ConfigMaps and network shares included.
_POLL_S: Final = 0.1
# Of Envoy, which has new servers late: for so long at most, asked so often.
_LONGEST_WAIT_S: Final = 15.0
_ASK_S: Final = 0.5
# For so long Envoy may still choose a server by an HTTPRoute that names it no more: longer than a bundle takes, and
# shorter than Envoy's own side keeps what has left.
_LINGER_S: Final = 5.0


class DirectoryFeed:
    """Feeds a directory's snapshots to the core. ``report``: what of the directory is in use."""

    def __init__(
        self,
        directory: Directory,
        core: Core,
        metrics: Metrics,
        *,
        settle_s: float,
        apply: Callable[[Snapshot], object],
        clock: Callable[[], float],
        known_to_envoy: Callable[
            [str, Collection[str]], Awaitable[Mapping[str, Collection[tuple[str, int]]] | None]
        ] = endpoints_in_envoy,
    ) -> None:
        """``apply`` puts a snapshot into use; raises ConfigInvalid, with nothing changed.

        ``settle_s``: how long after its reading a configuration with a new ModelServer is applied, and a server's first
        engine used. Another process tells Envoy of them, which until then has no route or no endpoint for the server.
        ``known_to_envoy``: asks at its admin address which servers, and which first engines, it has by then.
        """
        self._known_to_envoy = known_to_envoy
        self._apply = apply
        self._directory = directory
        self._settle_s = settle_s
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._draining = DrainingRoutedServers(_LINGER_S)
        self._warming = WarmingEngines(settle_s)
        # what was read last and is in use, without servers that drain
        self._snapshot: Snapshot | None = None
        self._version = ""
        self.report = ConfigReport()

    def started_with(self, snapshot: Snapshot) -> None:
        """The core was made with ``snapshot``."""
        self._snapshot = snapshot
        self._version = snapshot.version
        self.report = ConfigReport(files=snapshot.digests)
        self._metrics.config_applied()

    async def watch(self) -> None:
        """Until cancelled, follow the directory."""
        while True:
            if self._directory.has_changed():
                await self._reload()
            else:
                await self._go_on()
            await asyncio.sleep(_POLL_S)

    async def _reload(self) -> None:
        try:
            # decoding thousands of endpoints for the first time takes long enough to hold up requests
            snapshot = await asyncio.to_thread(self._directory.read)
        except ConfigInvalid as error:
            self._refuse(error)
            return
        if snapshot.version == self._version:
            self.report = ConfigReport(files=snapshot.digests)
            self._metrics.config_mended()
            return
        new = {server.metadata.key for server in snapshot.servers} - self._core.pools.keys()
        if new:
            # what changes meanwhile is read next; if the wait began anew, a directory that changes all the time would
            # never be used
            await asyncio.sleep(self._settle_s)
            await self._until_known(snapshot.gateway.admin, new)
        await self._new_engines_are_usable()
        now = self._clock()
        if self._snapshot is not None:
            self._draining.on_change(self._snapshot, snapshot, now)
        if not self._put_into_use(self._usable(snapshot, now)):
            return
        self._snapshot = snapshot
        self._version = snapshot.version
        self.report = ConfigReport(files=snapshot.digests)
        self._metrics.config_applied()
        log.info(
            "configuration %s applied: %d routes, %d servers",
            snapshot.version,
            len(snapshot.routes),
            len(snapshot.servers),
        )

    async def _until_known(self, admin: str, servers: Collection[str]) -> None:
        """Envoy reads a large bundle for seconds: if it answers and lacks a new server, it is waited for."""
        ends_s = self._clock() + _LONGEST_WAIT_S
        while self._clock() < ends_s:
            known = await self._known_to_envoy(admin, servers)
            if known is None or known.keys() >= set(servers):
                return
            await asyncio.sleep(_ASK_S)

    async def _go_on(self) -> None:
        """Forget servers that have left, once Envoy names them no more, and use engines that it knows by now."""
        has_engines = await self._new_engines_are_usable()
        if self._snapshot is None or (self._draining.is_empty and not has_engines):
            return
        usable = self._usable(self._snapshot, self._clock())
        if has_engines or len(usable.servers) != len(self._core.pools):
            self._put_into_use(usable)

    async def _new_engines_are_usable(self) -> bool:
        """Whether Envoy knows, or should know, another of the engines that were kept back."""
        servers = self._warming.pending(self._clock())
        if not servers:
            return False
        known = await self._known_to_envoy(self._core.snapshot.gateway.admin, servers)
        return self._warming.on_envoy_endpoints(known or {}, self._clock())

    def _usable(self, snapshot: Snapshot, now: float) -> Snapshot:
        """With servers that linger, and without engines that Envoy may not know yet."""
        return self._warming.without_warming(self._draining.with_draining(snapshot, now), self._has_engines, now)

    def _put_into_use(self, snapshot: Snapshot) -> bool:
        """Whether it is in use; the last good one stays otherwise."""
        try:
            self._apply(snapshot)
        except ConfigInvalid as error:
            self._refuse(error)
            return False
        except Exception:
            self._metrics.config_refused()
            log.exception("configuration %s could not be applied; please report this", snapshot.version)
            self._say_refused("makes extproc fail, whose log says how; please report it")
            return False
        return True

    def _has_engines(self, server: str) -> bool:
        """Of a server that is new here, all engines have stood long enough with it."""
        pool = self._core.pools.get(server)
        return pool is None or pool.readiness.can_serve

    def _refuse(self, error: Exception) -> None:
        self._metrics.config_refused()
        log.error("configuration refused, the last good one stays:\n%s", error)
        self._say_refused(str(error))

    def _say_refused(self, why: str) -> None:
        self.report = msgspec.structs.replace(self.report, refused=why)
