# SPDX-License-Identifier: Apache-2.0
"""The objects that a gateway's directory is compiled from: informers by kind, and what changed since the last time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from controller.gateway.compile.gateway_api.backends import trim_endpoint_slice
from controller.gateway.compile.model_servers import LABEL
from controller.gateway.compile.pods import trimmed_engine_pod
from controller.kube.api_resources import (
    CONFIG_MAPS,
    CRDS,
    ENDPOINT_SLICES,
    GATEWAY_CLASSES,
    GATEWAYS,
    GRPC_ROUTES,
    HTTP_ROUTES,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    NAMESPACES,
    PODS,
    REFERENCE_GRANTS,
    SECRETS,
    SERVICES,
    split_key,
)
from controller.kube.custom_resources import GATEWAY_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from controller.gateway.compile.referenced_secrets import ReferencedObjectKey
    from controller.kube.api_resources import Object
    from controller.kube.informer import Informer
    from controller.kube.shared_informers import InformerSet

# kinds that a cluster may lack, or that our account may not read
_OPTIONAL: Final = (
    INFERENCE_OBJECTIVES,
    SERVICES,
    GATEWAY_CLASSES,
    GATEWAYS,
    GRPC_ROUTES,
    HTTP_ROUTES,
    REFERENCE_GRANTS,
    INFERENCE_POOLS,
    NAMESPACES,
)
_REFERENCED: Final = {one.kind: one for one in (SECRETS, CONFIG_MAPS, CRDS)}
REFERENCED_KINDS: Final = ("Secret", "PointedConfigMap", CRDS.kind)


def gateway_informers(cache: InformerSet) -> dict[str, Informer]:
    """What the gateway role reads, by kind."""
    informers = [
        *(cache.add(one.resource) for one in GATEWAY_KINDS),
        *(cache.add(one, optional=True) for one in _OPTIONAL),
        cache.add(CONFIG_MAPS, labels=LABEL),
        cache.add(PODS, transform=trimmed_engine_pod),
        cache.add(ENDPOINT_SLICES, transform=trim_endpoint_slice, optional=True),
    ]
    return {one.resource.kind: one for one in informers}


class GatewayInformers:
    """``on_change`` is called when something has changed; ``changes`` has it."""

    def __init__(self, informers: Mapping[str, Informer], on_change: Callable[[], None]) -> None:
        self._informers = informers
        self._on_change = on_change
        self._changed: set[tuple[str, str]] = set()
        for kind, informer in informers.items():
            self._subscribe(kind, informer)

    def get(self, kind: str, key: str) -> Object | None:
        """An object as its informer has it; None if there is none."""
        return self._informers[kind].get(key)

    @contextlib.contextmanager
    def take_changes(self) -> Iterator[list[tuple[str, str]]]:
        """Kinds and keys of what has changed since the last time; kept for the next time if this one fails."""
        found, self._changed = self._changed, set()
        try:
            yield sorted(found)
        except BaseException:
            self._changed |= found
            raise

    def mark_changed(self, kind: str, key: str) -> None:
        """An object has changed."""
        self._changed.add((kind, key))
        self._on_change()

    def _subscribe(self, kind: str, informer: Informer) -> None:
        informer.subscribe(lambda key: self.mark_changed(kind, key))


class ReferencedObjectInformers:
    """Secrets, ConfigMaps and definitions that others refer to: an informer for each by its name, and no others are
    read.
    """

    def __init__(self, cache: InformerSet, on_change: Callable[[str, str], None]) -> None:
        self._cache = cache
        self._on_change = on_change
        self._informers: dict[ReferencedObjectKey, Informer] = {}

    async def read(self, references: Collection[ReferencedObjectKey], within_s: float) -> bool:
        """Read exactly these objects; waits up to ``within_s`` for new ones. Returns whether any was new."""
        for one in self._informers.keys() - set(references):
            self._cache.remove(self._informers.pop(one))
            self._on_change(one.compiler_kind, one.key)
        fresh = [one for one in sorted(references) if one not in self._informers]
        for one in fresh:
            self._informers[one] = self._informer(one)
        if fresh:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    for one in fresh:
                        await self._informers[one].answered.wait()
        return bool(fresh)

    def get(self, kind: str, key: str) -> Object | None:
        """An object as its informer has it; None if there is none, or nothing refers to it."""
        for one, informer in self._informers.items():
            if (one.compiler_kind, one.key) == (kind, key):
                return informer.get(key)
        return None

    def _informer(self, reference: ReferencedObjectKey) -> Informer:
        namespace, name = split_key(reference.key)
        informer = self._cache.add(
            _REFERENCED[reference.kind],
            namespace=namespace,
            fields=f"metadata.name={name}",
            transform=_metadata_alone if reference.kind == CRDS.kind else None,
            private=True,
        )
        informer.subscribe(lambda key: self._on_change(reference.compiler_kind, key))
        return informer


def _metadata_alone(thing: Object) -> Object:
    """Definitions are large."""
    return {name: thing[name] for name in ("apiVersion", "kind", "metadata") if name in thing}
