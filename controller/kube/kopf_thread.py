# SPDX-License-Identifier: Apache-2.0
"""kopf, in a thread and event loop of its own: in ours it would cancel tasks that it did not start.

It watches kinds and calls one handler for each event; it writes nothing and retries without end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import kopf

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from controller.kube.api_resources import ApiResource
    from controller.kube.cluster_access import ClusterAccess

log = logging.getLogger(__name__)

_PREFIX: Final = "attache.dev"
# Tokens of service accounts are renewed long before they end: read again that often.
_TOKEN_LIFE: Final = timedelta(minutes=5)
_BACKOFFS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
Enqueue = Callable[[str, str], None]
_PATIENCE_S: Final = 2.0
_CLOSING_S: Final = 0.25


class EndlessBackoffs:
    """An endless sequence of waits between attempts: kopf stops an operator when the sequence ends."""

    def __iter__(self) -> Iterator[float]:
        yield from _BACKOFFS_S
        while True:
            yield _BACKOFFS_S[-1]


def operator_settings() -> kopf.OperatorSettings:
    """No peering, no Events, no scan for new kinds, names of our own should kopf ever write."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.server_timeout = 290  # an API server reads no fractions
    settings.watching.inactivity_timeout = 70.0
    settings.queueing.idle_timeout = 0.5
    settings.queueing.exit_timeout = 0.1
    settings.persistence.finalizer = f"{_PREFIX}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=_PREFIX)
    return settings


def login(access: ClusterAccess) -> kopf.ConnectionInfo:
    """The credentials of kopf for the API server; refreshed every few minutes. Raises AccessInvalid."""
    _, _, token = access.headers().get("authorization", "").partition(" ")
    return kopf.ConnectionInfo(
        server=access.server,
        ca_data=access.ca or None,
        insecure=access.insecure or None,
        token=token or None,
        certificate_data=access.certificate or None,
        private_key_data=access.key or None,
        default_namespace=access.namespace,
        expiration=datetime.now(UTC) + _TOKEN_LIFE if access.token_file else None,
    )


"""Gets the kind and the key of an object that is new, has changed or is gone; called in kopf's thread."""


def register_handlers(kinds: Iterable[ApiResource], access: ClusterAccess, enqueue: Enqueue) -> kopf.OperatorRegistry:
    """All handlers, for ``kopf.operator``."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def log_in(**_: Any) -> kopf.ConnectionInfo:  # noqa: ANN401 - kopf's
        return login(access)

    for kind in kinds:
        _follow(kind, registry, enqueue)
    return registry


def _follow(kind: ApiResource, registry: kopf.OperatorRegistry, enqueue: Enqueue) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.kind)
    async def changed(name: str, namespace: str | None, **_: Any) -> None:  # noqa: ANN401 - kopf's
        enqueue(kind.kind, f"{namespace}/{name}" if namespace else name)


class KopfEnded(Exception):
    """kopf's thread has ended by itself, which it never should."""


class KopfOperator:
    """``run`` follows ``kinds`` (of ``namespace``, or of all); ``enqueue`` is called in the thread of the caller's
    loop.
    """

    def __init__(
        self, access: ClusterAccess, kinds: Sequence[ApiResource], enqueue: Enqueue, *, namespace: str | None = None
    ) -> None:
        self._access = access
        self._kinds = kinds
        self._ring = enqueue
        self._namespace = namespace
        self.ready = threading.Event()

    async def run(self) -> None:
        """Run kopf until cancelled. Raises HandlersEnded if kopf ends by itself: the manager must not go on without its
        events.
        """
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
        raise KopfEnded("kopf's thread has ended") from operator.error

    async def run_in_kopf_thread(self, operator: _Operator) -> None:
        """In kopf's thread."""
        registry = register_handlers(self._kinds, self._access, operator.enqueue_outside(self._ring))
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

    def __init__(self, owner: KopfOperator, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        self.stop = threading.Event()
        self.closed = threading.Event()
        self.error: BaseException | None = None
        self._owner = owner
        self._loop = loop
        self._ended = ended

    def start(self) -> None:
        # a process must not wait for it: it may hang in a call to a frozen API server
        threading.Thread(target=self._run, name="kopf", daemon=True).start()

    def enqueue_outside(self, enqueue: Enqueue) -> Enqueue:
        def outside(kind: str, key: str) -> None:
            if not self.closed.is_set():
                self._loop.call_soon_threadsafe(enqueue, kind, key)

        return outside

    def _run(self) -> None:
        # kopf logs each handled event, and that signals are not handled by it
        logging.getLogger("kopf").setLevel(logging.ERROR)
        try:
            asyncio.run(self._owner.run_in_kopf_thread(self))
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            self.error = error
        try:
            self._loop.call_soon_threadsafe(self._ended.set)
        except RuntimeError:
            log.debug("the event loop that started kopf has ended before it")
