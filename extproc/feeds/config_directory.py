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

from extproc.api.addresses import join_host_port, parse_address
from extproc.api.config_errors import ConfigInvalid
from extproc.api.make_before_break import DrainingRoutedServers, WarmingEngines
from extproc.api.status_page_contents import ConfigReport
from extproc.http_body import read_at_most

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from extproc.api.config_loader import ConfigSource
    from extproc.api.config_snapshot import Snapshot
    from extproc.core.core import Core
    from extproc.metrics.request_metrics import Metrics

log = logging.getLogger(__name__)

# While Envoy reads a bundle of thousands of routes, its admin interface does not answer for seconds.
_TIMEOUT_S: Final = 5.0
# Ten thousand engines have some 10 MB.
_MOST_BYTES: Final = 64 * 2**20
_DUMP: Final = "/config_dump"
# The bundle's clusters of ModelServers.
_PREFIX: Final = "server/"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where another process listens
# Polling works on every file system, mounted ConfigMaps and network shares included.
_POLL_S: Final = 0.1
# Of the wait for Envoy to have new servers: the longest wait, and the pause between two queries.
_LONGEST_WAIT_S: Final = 15.0
_ASK_S: Final = 0.5
# How long Envoy may still choose a server by an HTTPRoute that names it no more: longer than a bundle takes, and
# shorter than the bundle's writer keeps removed servers.
_LINGER_S: Final = 5.0


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


async def fetch_envoy_endpoints(
    admin: str, servers: Collection[str]
) -> Mapping[str, Collection[tuple[str, int]]] | None:
    """IP address and port of engines by ModelServer (``namespace/name``), without servers that it has no cluster for.

    ``admin``: the address of the interface. None if no Envoy answers there.
    """
    host, port = parse_address(admin)
    host = _ANY.get(host, host)
    names = "|".join(re.escape(one) for one in sorted(servers))
    query = {"resource": "dynamic_endpoint_configs", "include_eds": "", "name_regex": f"{_PREFIX}({names})"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"http://{join_host_port(host, port)}{_DUMP}", params=query, allow_redirects=False) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                return None
            body = await read_at_most(answer.content, _MOST_BYTES)
            if body is None:
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


class DirectoryFeed:
    """Feeds a directory's snapshots to the core. ``report``: what of the directory is in use."""

    def __init__(
        self,
        directory: ConfigSource,
        core: Core,
        metrics: Metrics,
        *,
        settle_s: float,
        apply: Callable[[Snapshot], object],
        clock: Callable[[], float],
        known_to_envoy: Callable[
            [str, Collection[str]], Awaitable[Mapping[str, Collection[tuple[str, int]]] | None]
        ] = fetch_envoy_endpoints,
    ) -> None:
        """``apply`` puts a snapshot into use; raises ConfigInvalid, with nothing changed.

        ``settle_s``: how long after its reading a configuration with a new ModelServer is applied, and a server's first
        engine used. Another process configures Envoy, which until then has no route or no endpoint for the server.
        ``known_to_envoy``: queries Envoy's admin address for the servers and first engines that it has.
        """
        self._known_to_envoy = known_to_envoy
        # whether it ever did: then it is busy while it does not
        self._envoy_answers = False
        # whether something was read that is not in use
        self._is_behind = False
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

    def set_initial_snapshot(self, snapshot: Snapshot) -> None:
        """The core was made with ``snapshot``."""
        self._snapshot = snapshot
        self._version = snapshot.version
        self.report = ConfigReport(files=snapshot.digests)
        self._metrics.on_config_applied()

    @property
    def warming_servers(self) -> frozenset[str]:
        """ModelServers none of whose engines is used yet, as Envoy may lack them."""
        return self._warming.servers

    async def watch(self) -> None:
        """Poll the directory until cancelled."""
        while True:
            if self._is_behind or self._directory.has_changed():
                self._is_behind = False
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
            self._metrics.on_config_mended()
            log.info("configuration %s, which is in use, is what the directory has again", snapshot.version)
            return
        if new := self._new_servers(snapshot):
            # changes made meanwhile are read next; if the wait began anew, a directory that changes continuously would
            # never be used
            await asyncio.sleep(self._settle_s)
            snapshot = await self._until_known(snapshot, new)
        await self._new_engines_are_usable()
        now = self._clock()
        if self._snapshot is not None:
            self._draining.on_change(self._snapshot, snapshot, now)
        if not self._put_into_use(self._usable(snapshot, now)):
            return
        self._snapshot = snapshot
        self._version = snapshot.version
        self.report = ConfigReport(files=snapshot.digests)
        self._metrics.on_config_applied()
        log.info(
            "configuration %s applied: %d routes, %d servers",
            snapshot.version,
            len(snapshot.routes),
            len(snapshot.servers),
        )

    def _new_servers(self, snapshot: Snapshot) -> frozenset[str]:
        return _names(snapshot) - self._core.pools.keys()

    async def _until_known(self, snapshot: Snapshot, new: frozenset[str]) -> Snapshot:
        """Wait while Envoy lacks a new server: it takes seconds to read a large bundle.

        Returns ``snapshot``, or the directory's next where that lacks one of them, too: the process that configures
        Envoy may have skipped ``snapshot``, and removes what it replaced. That process also refuses a directory that
        is broken meanwhile, so the wait lasts until it is mended, unless Envoy has the servers before.
        """
        ends_s, is_broken = self._clock() + _LONGEST_WAIT_S, False
        while new and (is_broken or self._clock() < ends_s):
            known = await self._query_envoy(snapshot.gateway.admin, new)
            if known.keys() >= new if known is not None else not self._envoy_answers:
                break
            if self._directory.has_changed():
                # read again in any case, unless it is taken here
                self._is_behind = True
                try:
                    later = await asyncio.to_thread(self._directory.read)
                except ConfigInvalid as error:
                    is_broken = True
                    self._refuse(error)
                else:
                    ends_s, is_broken = self._clock() + _LONGEST_WAIT_S if is_broken else ends_s, False
                    if not new <= _names(later):
                        snapshot, new, self._is_behind = later, self._new_servers(later), False
            if is_broken:
                await self._go_on()
            await asyncio.sleep(_ASK_S)
        return snapshot

    async def _query_envoy(
        self, admin: str, servers: Collection[str]
    ) -> Mapping[str, Collection[tuple[str, int]]] | None:
        known = await self._known_to_envoy(admin, servers)
        self._envoy_answers = self._envoy_answers or known is not None
        return known

    async def _go_on(self) -> None:
        """Remove drained servers that Envoy no longer names, and use warming engines that Envoy has by now."""
        has_engines = await self._new_engines_are_usable()
        if self._snapshot is None or (self._draining.is_empty and not has_engines):
            return
        usable = self._usable(self._snapshot, self._clock())
        if has_engines or len(usable.servers) != len(self._core.pools):
            self._put_into_use(usable)

    async def _new_engines_are_usable(self) -> bool:
        """Whether Envoy has, or should have, another of the engines that are warming."""
        servers = self._warming.servers_to_confirm(self._clock())
        if not servers:
            return False
        known = await self._query_envoy(self._core.snapshot.gateway.admin, servers)
        if known is None:
            known = dict.fromkeys(servers, ()) if self._envoy_answers else {}
        return self._warming.on_envoy_endpoints(known, self._clock())

    def _usable(self, snapshot: Snapshot, now: float) -> Snapshot:
        """``snapshot`` with draining servers, and without engines that Envoy may not have yet."""
        if self.report.refused:
            # the process that configures Envoy refuses it, too, and may not have read before what removed them
            self._draining.restart_drain(now)
        return self._warming.without_warming(self._draining.with_draining(snapshot, now), self._has_engines, now)

    def _put_into_use(self, snapshot: Snapshot) -> bool:
        """Whether it is in use; the last good one stays otherwise."""
        try:
            self._apply(snapshot)
        except ConfigInvalid as error:
            self._refuse(error)
            return False
        except Exception:
            self._metrics.on_config_refused()
            log.exception("configuration %s could not be applied; please report this", snapshot.version)
            self._report_refusal("makes extproc fail, whose log says how; please report it")
            return False
        return True

    def _has_engines(self, server: str) -> bool:
        """Whether the server has engines in use; True for a new server, whose engines have warmed with it."""
        pool = self._core.pools.get(server)
        return pool is None or pool.readiness.can_serve

    def _refuse(self, error: Exception) -> None:
        self._metrics.on_config_refused()
        log.error("configuration refused, the last good one stays: %s", "; ".join(str(error).splitlines()))
        self._report_refusal(str(error))

    def _report_refusal(self, why: str) -> None:
        self.report = msgspec.structs.replace(self.report, refused=why)


def _names(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(server.metadata.key for server in snapshot.servers)
