# SPDX-License-Identifier: Apache-2.0
"""Calls on stored objects: what a path names, and create, update, patch, apply, delete, bind."""

from __future__ import annotations

import base64
import copy
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import CRDS, SECRETS, Object
from tests.fake_api.answers import ApiError, bad_request, conflict, invalid, not_found
from tests.fake_api.kinds import ServedKind, faults_in, unknown_fields, with_defaults, without_fields
from tests.fake_api.patches import FieldOwnership, Owners, apply_json_patch, apply_merge_patch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fake_api.kinds import Kinds
    from tests.fake_api.storage import Storage

_NOTHING: Final[Mapping[str, Any]] = {}


class ResourcePath(msgspec.Struct, frozen=True):
    """A collection without ``name``; of all namespaces without ``namespace``, if its kind has any."""

    kind: ServedKind
    namespace: str | None = None
    name: str = ""
    subresource: str = ""


def target_of(path: str, kinds: Kinds) -> ResourcePath | None:
    """What ``path`` names; None if the server has nothing there."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    kind = kinds.find(group, version, rest[0])
    if kind is None or len(rest) > 3 or (namespace is not None) > kind.resource.namespaced:
        return None
    plural, name, subresource = [*rest, "", ""][:3]
    return ResourcePath(kind, namespace, name, subresource) if plural else None


class WriteOptions(msgspec.Struct, frozen=True):
    """The options of a write."""

    manager: str = "unknown"
    force: bool = False
    strict: bool = False
    dry_run: bool = False


def _owner(target: ResourcePath, how: WriteOptions) -> str:
    """The owner of fields that are written: what a manager applies to a subresource is apart from the rest."""
    return f"{how.manager} of {target.subresource}" if target.subresource else how.manager


class Objects:
    """What a server does with objects between a request and the storage."""

    def __init__(self, storage: Storage, kinds: Kinds) -> None:
        self._storage = storage
        self._kinds = kinds
        # field owners, by an object's uid
        self._owners: dict[str, Owners] = {}

    def owners(self, uid: str) -> Owners:
        """The leaves of the object with this uid, by the manager that owns them."""
        return self._owners.get(uid, {})

    def create(self, target: ResourcePath, thing: Object, how: WriteOptions) -> Object:
        """A new object; raises Refused."""
        if target.subresource == "binding":
            return self._bind(target, thing)
        new = _admitted(target.kind, self._named(target, thing), how)
        if target.kind.resource == SECRETS:
            _encode_strings(new)
        if how.dry_run:
            return new
        made = self._storage.create(target.kind, new)
        self._owners[made["metadata"]["uid"]] = FieldOwnership(target.kind.list_keys).written(
            _NOTHING, made, {}, how.manager
        )
        if target.kind.resource == CRDS:
            made = self._establish(target, made)
        return made

    def update(self, target: ResourcePath, thing: Object, how: WriteOptions) -> Object:
        """An object replaced; raises Refused."""
        old = self._storage.get(target.kind, target.namespace, target.name)
        return self._write(target, old, self._named(target, thing), how)

    def patch(self, target: ResourcePath, body: Any, content_type: str, how: WriteOptions) -> Object:  # noqa: ANN401 - JSON
        """An object changed by a patch of any of the three kinds; raises Refused."""
        if "apply-patch" in content_type:
            return self._apply(target, body, how)
        old = self._storage.get(target.kind, target.namespace, target.name)
        if "json-patch" in content_type:
            new = apply_json_patch(old, body)
        elif "merge-patch" in content_type:
            new = apply_merge_patch(old, body)
        else:
            raise ApiError(
                415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}"
            )
        return self._write(target, old, new, how)

    def delete(self, target: ResourcePath, options: Mapping[str, Any]) -> Object:
        """The object, marked or removed; raises Refused."""
        old = self._storage.get(target.kind, target.namespace, target.name)
        gone = self._storage.delete(
            target.kind,
            old,
            grace_s=options.get("gracePeriodSeconds"),
            uid=(options.get("preconditions") or {}).get("uid", ""),
            orphan=options.get("propagationPolicy") == "Orphan",
        )
        if self._storage.find(target.kind, target.namespace, target.name) is None:
            self._owners.pop(old["metadata"]["uid"], None)
            if target.kind.resource == CRDS:
                self._kinds.forget(old)
        return gone

    def _apply(self, target: ResourcePath, body: Object, how: WriteOptions) -> Object:
        thing = self._named(target, body)
        old = self._storage.find(target.kind, target.namespace, target.name)
        if old is None:
            if target.subresource:
                raise not_found(target.kind.resource.plural, target.name)
            return self.create(target, thing, how)
        owners = self._owners.get(old["metadata"]["uid"], {})
        applying = FieldOwnership(target.kind.list_keys)
        manager = _owner(target, how)
        met = {} if how.force else applying.conflicts(old, thing, owners, manager)
        if met:
            message = ", ".join(f'conflict with "{other}": .{".".join(path)}' for path, other in sorted(met.items()))
            refused = conflict(
                target.kind.resource.plural, target.name, f"Apply failed with {len(met)} conflicts: {message}"
            )
            causes = [
                {"reason": "FieldManagerConflict", "message": f'conflict with "{other}"', "field": "." + ".".join(path)}
                for path, other in sorted(met.items())
            ]
            raise ApiError(refused.code, refused.reason, str(refused), {**refused.details, "causes": causes})
        new, owners = applying.apply(old, thing, owners, manager)
        if not thing["metadata"].get("resourceVersion"):
            new["metadata"].pop("resourceVersion", None)
        result = self._write(target, old, new, how)
        if not how.dry_run:
            self._owners[old["metadata"]["uid"]] = owners
        return result

    def _write(self, target: ResourcePath, old: Object, new: Object, how: WriteOptions) -> Object:
        new = _admitted(target.kind, new, how)
        if how.dry_run:
            return new
        result = self._storage.update(target.kind, old, new, target.subresource)
        uid = old["metadata"]["uid"]
        applying = FieldOwnership(target.kind.list_keys)
        self._owners[uid] = applying.written(old, result, self._owners.get(uid, {}), _owner(target, how))
        if target.kind.resource == CRDS and not target.subresource:
            self._kinds.define(result)
        return result

    def _named(self, target: ResourcePath, thing: object) -> Object:
        """The object with its kind and the path's namespace and name, which must not disagree with its own."""
        if not isinstance(thing, dict) or not isinstance(thing.get("metadata"), dict):
            raise bad_request("the object has no metadata")
        new = copy.deepcopy(thing)
        resource, metadata = target.kind.resource, new["metadata"]
        if (
            new.setdefault("kind", resource.kind) != resource.kind
            or new.setdefault("apiVersion", resource.api_version) != resource.api_version
        ):
            raise bad_request(
                f"the API version in the data ({new['apiVersion']}, {new['kind']}) does not match the path"
            )
        if resource.namespaced and metadata.setdefault("namespace", target.namespace) != target.namespace:
            raise bad_request("the namespace of the object does not match the namespace on the request")
        if target.name and metadata.setdefault("name", target.name) != target.name:
            raise bad_request("the name of the object does not match the name on the URL")
        return new

    def _establish(self, target: ResourcePath, crd: Object) -> Object:
        self._kinds.define(crd)
        names = crd["spec"]["names"]
        conditions = [{"type": kind, "status": "True", "reason": "Fake"} for kind in ("NamesAccepted", "Established")]
        new = {**crd, "status": {"conditions": conditions, "acceptedNames": names}}
        return self._storage.update(target.kind, crd, new, "status")

    def _bind(self, target: ResourcePath, binding: Object) -> Object:
        pod = self._storage.get(target.kind, target.namespace, target.name)
        if pod["spec"].get("nodeName"):
            raise conflict("pods/binding", target.name, f"pod is already assigned to node {pod['spec']['nodeName']!r}")
        new = copy.deepcopy(pod)
        new["spec"]["nodeName"] = binding["target"]["name"]
        bound = self._storage.update(target.kind, pod, new)
        condition = {"type": "PodScheduled", "status": "True"}
        others = [one for one in bound["status"].get("conditions") or () if one["type"] != "PodScheduled"]
        status = {**bound["status"], "conditions": [*others, condition]}
        self._storage.update(target.kind, bound, {**bound, "status": status}, "status")
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _encode_strings(secret: Object) -> None:
    strings = secret.pop("stringData", None) or {}
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in strings.items()}
    if encoded:
        secret["data"] = {**(secret.get("data") or {}), **encoded}


def _admitted(kind: ServedKind, thing: Object, how: WriteOptions) -> Object:
    """A custom resource with defaults and without unknown fields; raises Refused if it breaks its schema."""
    if not kind.schema:
        return thing
    unknown = unknown_fields(thing, kind.schema)
    if unknown and how.strict:
        raise bad_request("strict decoding error: " + ", ".join(f'unknown field "{one}"' for one in unknown))
    new: Object = with_defaults(without_fields(thing, unknown), kind.schema)
    faults = faults_in(new, kind.schema)
    if faults:
        raise invalid(kind.resource.kind, thing["metadata"].get("name", ""), faults)
    return new
