# SPDX-License-Identifier: Apache-2.0
"""All ModelServers, those that stand for InferencePools included, with their pods; only what changed is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.gateway.compile.pickers import Picker, picker_of
from controller.gateway.compile.pod_index import PodIndex
from controller.gateway.compile.pods import pod_of
from controller.gateway.compile.pools import PREFIX, pool_key, server_key, server_of
from controller.gateway.compile.servers import ServerResult, compile_server, refused_server
from controller.gateway.compile.sources import Source, source_of
from extproc.api.model_server import ModelServer
from extproc.api.spec import namespace_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from controller.gateway.compile.connections import Read
    from controller.gateway.compile.secrets import Pointer
    from controller.kube.conditions import WantedStatus
    from extproc.api.picker_config import PickerCheck


class ServerSet:
    """``put_...`` takes what changed, None for what is gone; ``compile`` brings ``results`` and ``usable`` up to date.

    ``check_picker``: that of the extproc that reads the directory. ``read``: what Secrets and ConfigMaps hold.
    """

    def __init__(self, check_picker: PickerCheck, read: Read) -> None:
        self._check_picker = check_picker
        self._read = read
        self._sources: dict[str, Source] = {}
        # keys of ModelServer objects that have the name of a pool's
        self._refused: dict[str, Source] = {}
        self._pods = PodIndex()
        self._pickers: dict[str, Picker] = {}
        self._stale: set[str] = set()
        self.results: dict[str, ServerResult] = {}
        # keys of those that have a document
        self.usable: frozenset[str] = frozenset()
        # why pools cannot be used, by the pool's key
        self._pool_problems: dict[str, str] = {}

    def put_server(self, key: str, source: Source | None) -> None:
        """A ModelServer object."""
        if not is_pools(key):
            self._put(key, source)
        elif source is None:
            self._refused.pop(key, None)
        else:
            self._refused[key] = source

    def put_pool(self, key: str, thing: Mapping[str, Any] | None) -> None:
        """An InferencePool, as the API server has it."""
        self._pool_problems.pop(key, None)
        made = None if thing is None else server_of(thing)
        source = None if made is None or made.server is None else source_of(made.server)
        if made is not None and made.server is None:
            self._pool_problems[key] = made.complaint
        elif source is not None and source.mistakes:
            self._pool_problems[key] = source.complaint()
        self._put(server_key(key), source)

    def put_pod(self, key: str, thing: Mapping[str, Any] | None) -> None:
        """A pod, as the API server has it."""
        self._stale.update(self._pods.put(key, None if thing is None else pod_of(thing)))

    def put_picker(self, key: str, thing: Mapping[str, Any] | None) -> None:
        """A ConfigMap that may hold an EndpointPickerConfig."""
        self._pickers.pop(key, None)
        if thing is not None:
            self._pickers[key] = picker_of(key, thing, self._check_picker)
        namespace = namespace_of(key)
        self._stale |= {one for one in self._sources if namespace_of(one) == namespace}

    def pointed_changed(self, kind: str, key: str) -> None:
        """An object that ``read`` gives has changed. ``kind``: as a pointer's ``compiled_as``."""
        self._stale |= {
            name
            for name, one in self.results.items()
            if any((pointer.compiled_as, pointer.key) == (kind, key) for pointer in one.pointers)
        }

    def compile(self) -> None:
        """What changed."""
        for key in self._stale:
            source = self._sources.get(key)
            if source is None:
                self.results.pop(key, None)
            else:
                self.results[key] = compile_server(source, self._pods.of(key), self._pickers, self._read)
        if self._stale:
            self.usable = frozenset(key for key, one in self.results.items() if one.document is not None)
        self._stale.clear()

    def picker_files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the EndpointPickerConfigs that can be used."""
        return ((one.file, one.content) for one in self._pickers.values() if not one.problem)

    def pointers(self) -> frozenset[Pointer]:
        """What connections refer to."""
        return frozenset(pointer for one in self.results.values() for pointer in one.pointers)

    def connection_files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the certificates and keys that connections need."""
        for one in self.results.values():
            yield from one.files.items()

    def pool_problems(self) -> Mapping[str, str]:
        """Why pools cannot be used, by the pool's key."""
        unconnected = {
            pool_key(key): one.unconnected for key, one in self.results.items() if one.unconnected and is_pools(key)
        }
        return {**unconnected, **self._pool_problems}

    def documents(self, pools: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Of all ModelServers, and of ``pools``, which are named by the keys of their ModelServers."""
        for key, one in self.results.items():
            if one.document is not None and (key in pools or not is_pools(key)):
                yield key, one.document

    def statuses(self) -> Iterator[WantedStatus]:
        """Of the ModelServer objects. Pools say something else of themselves."""
        yield from (one.status for key, one in self.results.items() if not is_pools(key))
        for source in self._refused.values():
            yield refused_server(source, f"names that begin with {PREFIX} are those of InferencePools").status

    def decoded(self) -> Iterator[ModelServer]:
        """The ModelServer objects that are served."""
        for key in self.usable:
            found = self._sources[key].decoded
            if isinstance(found, ModelServer) and not is_pools(key):
                yield found

    def _put(self, key: str, source: Source | None) -> None:
        if source is None:
            self._sources.pop(key, None)
        else:
            self._sources[key] = source
        self._pods.select(key, _selector(source))
        self._stale.add(key)


def is_pools(key: str) -> bool:
    """Whether a ModelServer of this key stands for a pool."""
    return key.partition("/")[2].startswith(PREFIX)


def _selector(source: Source | None) -> Mapping[str, str] | None:
    """The labels of a ModelServer's pods; None if it has no pods."""
    if source is None or not isinstance(source.decoded, ModelServer):
        return None
    selector = source.decoded.spec.workload_selector
    return None if selector is None else selector.match_labels
