# SPDX-License-Identifier: Apache-2.0
"""The API server of a virtual cluster: the fake server's storage under virtual time, without HTTP."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Final

from controller.kube.api_resources import NODES, PODS, ApiResource, Object, key_of, split_key
from controller.kube.custom_resources import KINDS, crd_object
from tests.fake_api.kinds import Kinds, ServedKind
from tests.fake_api.objects import Objects, ResourcePath, WriteOptions
from tests.fake_api.storage import ObjectChange, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.virtual_cluster.clock import Clock

NAMESPACE: Final = "default"


@cache
def _definitions() -> tuple[Object, ...]:
    """All kinds as CustomResourceDefinitions."""
    return tuple(crd_object(one) for one in KINDS)


class VirtualApiServer:
    """Objects of all kinds. What it hands out must not be changed. Refusals are ``Refused``, as the fake server has
    them.
    """

    def __init__(self, clock: Clock) -> None:
        self.kinds = Kinds()
        for one in _definitions():
            self.kinds.define(one)
        self._others: dict[ApiResource, ServedKind] = {}
        numbers = itertools.count(1)
        self.storage = Storage(clock.wall, new_uid=lambda: f"00000000-0000-4000-8000-{next(numbers):012}")
        self._objects = Objects(self.storage, self.kinds)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self.storage.create(self._find("", "v1", "namespaces"), namespace)

    def subscribe(self, listener: Callable[[ObjectChange], None]) -> Callable[[], None]:
        """Call ``listener`` with each change, while it is made; what comes back ends that."""
        return self.storage.subscribe(listener)

    def kind(self, resource: ApiResource) -> ServedKind:
        """How a resource is stored; an undefined one has a status and no schema."""
        known = self.kinds.find(resource.group, resource.version, resource.plural)
        return known or self._others.setdefault(resource, ServedKind(resource, has_status=True))

    def stored(self) -> list[ServedKind]:
        """All kinds that there may be objects of."""
        return [*self.kinds.all(), *self._others.values()]

    def all(self, resource: ApiResource) -> list[Object]:
        """All objects of a kind, by key."""
        return self.storage.all(self.kind(resource))

    def find(self, resource: ApiResource, key: str) -> Object | None:
        """One object, or None."""
        return self.storage.find(self.kind(resource), *split_key(key))

    def create(self, resource: ApiResource, thing: Object, manager: str = "user") -> Object:
        """A new object, with the defaults of its schema."""
        target = ResourcePath(self.kind(resource), thing["metadata"].get("namespace"))
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **thing}
        return self._objects.create(target, body, WriteOptions(manager=manager))

    def dry_run(self, resource: ApiResource, thing: Object) -> Object:
        """What ``create`` would make, which has no uid yet."""
        target = ResourcePath(self.kind(resource), thing["metadata"].get("namespace"))
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **thing}
        return self._objects.create(target, body, WriteOptions(dry_run=True))

    def apply(self, resource: ApiResource, thing: Object, manager: str) -> Object:
        """Server-side apply, which takes fields from others."""
        metadata = thing["metadata"]
        target = ResourcePath(self.kind(resource), metadata.get("namespace"), metadata["name"])
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **thing}
        return self._objects.patch(
            target, body, "application/apply-patch+yaml", WriteOptions(manager=manager, force=True)
        )

    def is_owned_by_another(self, resource: ApiResource, key: str, path: tuple[str, ...], manager: str) -> bool:
        """Whether another manager owns this field of an object."""
        thing = self.find(resource, key)
        owners = {} if thing is None else self._objects.owners(thing["metadata"]["uid"])
        return any(path in leaves for other, leaves in owners.items() if other != manager)

    def change(
        self, resource: ApiResource, key: str, change: Callable[[Object], Object], subresource: str = ""
    ) -> Object:
        """An object replaced by what ``change`` makes of it."""
        kind, (namespace, name) = self.kind(resource), split_key(key)
        old = self.storage.get(kind, namespace, name)
        return self.storage.update(kind, old, change(old), subresource)

    def patch(self, resource: ApiResource, key: str, patch: Mapping[str, object], manager: str) -> Object:
        """A merge patch; ``metadata.uid`` in it must be the object's."""
        namespace, name = split_key(key)
        target = ResourcePath(self.kind(resource), namespace, name)
        return self._objects.patch(target, patch, "application/merge-patch+json", WriteOptions(manager=manager))

    def delete(self, resource: ApiResource, key: str, *, uid: str = "", grace_s: int | None = None) -> Object:
        """An object marked, or removed."""
        kind, (namespace, name) = self.kind(resource), split_key(key)
        return self.storage.delete(kind, self.storage.get(kind, namespace, name), grace_s=grace_s, uid=uid)

    def set_status(self, resource: ApiResource, thing: Object, status: Mapping[str, object]) -> None:
        """Write the status of ``thing``, if that is still there."""
        now = self.find(resource, key_of(thing))
        if now is not None and now["metadata"]["uid"] == thing["metadata"]["uid"]:
            self.storage.update(self.kind(resource), now, {**now, "status": dict(status)}, "status")

    def pods(self) -> list[Object]:
        """All pods."""
        return self.all(PODS)

    def nodes(self) -> list[Object]:
        """All nodes."""
        return self.all(NODES)

    def _find(self, group: str, version: str, plural: str) -> ServedKind:
        found = self.kinds.find(group, version, plural)
        assert found is not None
        return found
