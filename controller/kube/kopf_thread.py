# SPDX-License-Identifier: Apache-2.0
"""Runs kopf in a thread and event loop of its own: in ours it would cancel tasks that it did not start."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

import kopf

from controller.kube.kopf_handlers import handlers
from controller.kube.kopf_settings import operator_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.kube.access import Access
    from controller.kube.kopf_handlers import Ring
    from controller.kube.resources import Resource

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 2.0
_CLOSING_S: Final = 0.25


class HandlersEnded(Exception):
    """kopf's thread has ended by itself, which it never should."""


class Handlers:
    """``run`` follows ``kinds`` (of ``namespace``, or of all); ``ring`` is called in the thread of the caller's
    loop.
    """

    def __init__(self, access: Access, kinds: Sequence[Resource], ring: Ring, *, namespace: str | None = None) -> None:
        self._access = access
        self._kinds = kinds
        self._ring = ring
        self._namespace = namespace
        self.ready = threading.Event()

    async def run(self) -> None:
        """Until cancelled. Raises HandlersEnded if kopf ends by itself: half a manager must not live on in silence."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        operator = _Operator(self, loop, ended)
        operator.start()
        try:
            await ended.wait()
        finally:
            operator.stop.set()
            # it rings no more, whether it ends in time or not
            operator.closed.set()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await ended.wait()
            except TimeoutError:
                log.warning("kopf's thread has not ended within %g s; it is left alone", _PATIENCE_S)
        raise HandlersEnded("kopf's thread has ended") from operator.error

    async def operate(self, operator: _Operator) -> None:
        """In kopf's thread."""
        registry = handlers(self._kinds, self._access, operator.ring_outside(self._ring))
        await kopf.operator(
            registry=registry,
            settings=operator_settings(),
            standalone=True,
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else (self._namespace,),
            stop_flag=operator.stop,
            ready_flag=self.ready,
        )
        # its TLS connections close after its session has
        await asyncio.sleep(_CLOSING_S)


class _Operator:
    """One life of the thread."""

    def __init__(self, owner: Handlers, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        self.stop = threading.Event()
        self.closed = threading.Event()
        self.error: BaseException | None = None
        self._owner = owner
        self._loop = loop
        self._ended = ended

    def start(self) -> None:
        # a process must not wait for it: it may hang in a call to a frozen API server
        threading.Thread(target=self._run, name="kopf", daemon=True).start()

    def ring_outside(self, ring: Ring) -> Ring:
        def outside(kind: str, key: str) -> None:
            if not self.closed.is_set():
                self._loop.call_soon_threadsafe(ring, kind, key)

        return outside

    def _run(self) -> None:
        # it tells each event that a handler took, and that signals are not its own
        logging.getLogger("kopf").setLevel(logging.ERROR)
        try:
            asyncio.run(self._owner.operate(self))
        except BaseException as error:  # noqa: BLE001 - told in the other thread
            self.error = error
        try:
            self._loop.call_soon_threadsafe(self._ended.set)
        except RuntimeError:
            log.debug("the event loop that started kopf has ended before it")
