# SPDX-License-Identifier: Apache-2.0
"""The fake server's rules, piece by piece; that it answers as a real one does is tested in tests/with_kube."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from controller.kube.api_resources import CONFIG_MAPS, NAMESPACES, PODS
from tests.fake_api.answers import ApiError, selector
from tests.fake_api.kinds import Kinds, ServedKind, faults_in, unknown_fields, with_defaults, without_fields
from tests.fake_api.objects import Objects, ResourcePath, WriteOptions, target_of
from tests.fake_api.patches import FieldOwnership, Owners, apply_json_patch, apply_merge_patch, keys_in
from tests.fake_api.storage import Storage


def test_a_merge_patch_leaves_its_target_alone() -> None:
    target = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert apply_merge_patch(target, {"a": {"b": None}, "d": [2], "e": {"f": None}}) == {
        "a": {"c": 2},
        "d": [2],
        "e": {},
    }
    assert target == {"a": {"b": 1, "c": 2}, "d": [1]}


def test_a_json_patch_does_what_its_operations_say() -> None:
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/a/b", "value": 1},
        {"op": "add", "path": "/list/-", "value": 3},
        {"op": "add", "path": "/list/0", "value": 0},
        {"op": "remove", "path": "/list/1"},
        {"op": "replace", "path": "/a/b", "value": 2},
        {"op": "add", "path": "/a/x~1y", "value": 4},
        {"op": "copy", "from": "/a/b", "path": "/c"},
        {"op": "move", "from": "/a/b", "path": "/d"},
    ]
    assert apply_json_patch({"a": {"b": 1}, "list": [1]}, operations) == {
        "a": {"x/y": 4},
        "list": [0, 3],
        "c": 2,
        "d": 2,
    }


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a", "value": 2},
        {"op": "remove", "path": "/none"},
        {"op": "replace", "path": "/a/b/c", "value": 1},
        {"op": "fly", "path": "/a"},
        {"op": "replace", "path": "", "value": 1},
    ],
)
def test_a_json_patch_that_fails_is_refused(operation: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        apply_json_patch({"a": 1}, [operation])


def applied(live: dict[str, Any], thing: dict[str, Any], owners: Owners, manager: str) -> tuple[dict[str, Any], Owners]:
    assert not FieldOwnership().conflicts(live, thing, owners, manager)
    return FieldOwnership().apply(live, thing, owners, manager)


def test_what_a_manager_no_longer_applies_goes_unless_another_wants_it() -> None:
    live, owners = applied({}, {"spec": {"a": 1, "b": 2}}, {}, "one")
    live, owners = applied(live, {"spec": {"b": 2, "c": 3}}, owners, "two")
    live, owners = applied(live, {"spec": {"d": 4}}, owners, "one")
    assert live == {"spec": {"b": 2, "c": 3, "d": 4}}
    live, owners = applied(live, {}, owners, "two")
    assert live == {"spec": {"d": 4}}


def test_items_with_keys_are_merged_and_other_lists_are_replaced() -> None:
    first = {"containers": [{"name": "a", "image": "x"}], "plain": [1]}
    live, owners = applied({}, first, {}, "one")
    live, owners = applied(live, {"containers": [{"name": "b", "image": "y"}]}, owners, "two")
    assert live["containers"] == [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]
    live, owners = applied(live, {"plain": [2]}, owners, "one")
    assert live == {"containers": [{"name": "b", "image": "y"}], "plain": [2]}


def test_a_field_that_another_owns_is_a_conflict_unless_the_value_is_the_same() -> None:
    live, owners = applied({}, {"spec": {"a": 1}}, {}, "one")
    assert FieldOwnership().conflicts(live, {"spec": {"a": 1}}, owners, "two") == {}
    assert FieldOwnership().conflicts(live, {"spec": {"a": 2}}, owners, "two") == {("spec", "a"): "one"}
    forced, owners = FieldOwnership().apply(live, {"spec": {"a": 2}}, owners, "two")
    assert forced == {"spec": {"a": 2}}
    assert owners == {"two": {("spec", "a")}}


def test_a_plain_write_takes_what_it_changes() -> None:
    live, owners = applied({}, {"spec": {"a": 1, "b": 1}}, {}, "one")
    after = {"spec": {"a": 2, "c": 3}}
    assert FieldOwnership().written(live, after, owners, "kubectl") == {"kubectl": {("spec", "a"), ("spec", "c")}}


def test_an_empty_object_takes_nothing_from_others() -> None:
    live, owners = applied({}, {"spec": {"a": {"b": 1}}}, {}, "one")
    live, owners = applied(live, {"spec": {"a": {}}}, owners, "two")
    assert live == {"spec": {"a": {"b": 1}}}


def test_a_crd_says_which_of_its_lists_have_keys() -> None:
    ports = {"type": "array", "x-kubernetes-list-map-keys": ["port", "protocol"], "items": {"type": "object"}}
    schema = {"properties": {"spec": {"properties": {"ports": ports, "volumes": {"type": "array"}}}}}
    applying = FieldOwnership(keys_in(schema))
    live: dict[str, Any] = {}
    owners: Owners = {}
    for manager, protocol in (("one", "TCP"), ("two", "UDP")):
        thing = {"spec": {"ports": [{"port": 1, "protocol": protocol}], "volumes": [{"name": manager}]}}
        live, owners = applying.apply(live, thing, owners, manager)
    assert live["spec"]["ports"] == [{"port": 1, "protocol": "TCP"}, {"port": 1, "protocol": "UDP"}]
    assert live["spec"]["volumes"] == [{"name": "two"}], "a list without keys is replaced whole"


@pytest.mark.parametrize(
    ("labels", "fields", "found"),
    [
        ("", "", True),
        ("a=1", "", True),
        ("a==1,b!=3", "", True),
        ("a!=1", "", False),
        ("c!=1", "", True),
        ("a in (1, 2)", "", True),
        ("a notin (1)", "", False),
        ("c notin (1)", "", True),
        ("a,!c", "", True),
        ("!a", "", False),
        ("", "metadata.name=x", True),
        ("", "metadata.name!=x", False),
        ("", "spec.none=", True),
    ],
)
def test_selectors_select(labels: str, fields: str, found: bool) -> None:
    thing = {"metadata": {"name": "x", "labels": {"a": "1", "b": "2"}}}
    assert selector(labels, fields)(thing) is found


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "required": ["size"],
            "properties": {
                "size": {"type": "integer", "minimum": 1, "exclusiveMaximum": True, "maximum": 9},
                "mode": {"type": "string", "default": "slow", "enum": ["slow", "fast"]},
                "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
                "port": {"x-kubernetes-int-or-string": True},
                "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "named": {
                    "type": "object",
                    "additionalProperties": {"type": "object", "properties": {"x": {"default": 1}}},
                },
                "items": {
                    "type": "array",
                    "maxItems": 2,
                    "x-kubernetes-list-map-keys": ["key"],
                    "items": {"type": "object", "properties": {"key": {"type": "string"}}},
                },
            },
        }
    },
}


def test_defaults_are_filled_in_at_every_depth() -> None:
    given = {"spec": {"size": 1, "named": {"a": {}}}}
    assert with_defaults(given, SCHEMA)["spec"] == {"size": 1, "mode": "slow", "named": {"a": {"x": 1}}}


def test_unknown_fields_are_found_and_pruned() -> None:
    thing = {"metadata": {"x": 1}, "spec": {"size": 1, "sise": 2, "any": {"x": 1}, "items": [{"key": "a", "bad": 1}]}}
    unknown = unknown_fields(thing, SCHEMA)
    assert unknown == ["spec.sise", "spec.items[0].bad"]
    assert without_fields(thing, unknown)["spec"] == {"size": 1, "any": {"x": 1}, "items": [{"key": "a"}]}


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ({}, "spec.size: Required"),
        ({"size": 0}, "spec.size: Invalid"),
        ({"size": 9}, "spec.size: Invalid"),
        ({"size": "1"}, "spec.size: Invalid"),
        ({"size": True}, "spec.size: Invalid"),
        ({"size": None}, "spec.size: Invalid"),
        ({"size": 1, "mode": "x"}, "spec.mode: Unsupported"),
        ({"size": 1, "name": "A"}, "spec.name: Invalid"),
        ({"size": 1, "name": "abcd"}, "spec.name: Too many"),
        ({"size": 1, "port": []}, "spec.port: Invalid"),
        ({"size": 1, "items": [{"key": "a"}, {"key": "b"}, {"key": "c"}]}, "spec.items: Too many"),
        ({"size": 1, "items": [{"key": "a"}, {"key": "a"}]}, "spec.items: Duplicate"),
        ({"size": 1, "items": [{"key": 1}]}, "spec.items[0].key: Invalid"),
        ({"size": 1, "items": [{"key": []}, {"key": "a"}]}, "spec.items[0].key: Invalid"),
    ],
)
def test_what_breaks_the_schema_is_named(spec: dict[str, Any], place: str) -> None:
    (fault,) = faults_in({"spec": spec}, SCHEMA)
    assert fault.startswith(place)


def test_paths_name_what_the_server_has() -> None:
    kinds = Kinds()

    def named(path: str) -> tuple[str, str | None, str, str] | None:
        found = target_of(path, kinds)
        return None if found is None else (found.kind.resource.plural, found.namespace, found.name, found.subresource)

    assert named("/api/v1/pods") == ("pods", None, "", "")
    assert named("/api/v1/namespaces/a/pods/b/status") == ("pods", "a", "b", "status")
    assert named("/api/v1/namespaces/a") == ("namespaces", None, "a", "")
    assert named("/api/v1/namespaces/a/status") == ("namespaces", None, "a", "status")
    assert named("/apis/apps/v1/namespaces/a/deployments") == ("deployments", "a", "", "")
    for path in ("/", "/api/v1", "/api/v1/nothings", "/api/v1/namespaces/a/nodes/b", "/api/v1/pods/a/b/c/d"):
        assert named(path) is None


def storage(remembered: int = 10) -> Storage:
    made = Storage(lambda: datetime(2030, 1, 1, tzinfo=UTC), remembered)
    made.create(ServedKind(NAMESPACES), {"metadata": {"name": "default"}})
    return made


POD_KIND = ServedKind(PODS, has_status=True)


def test_what_a_manager_applies_to_a_status_leaves_what_it_applied_before() -> None:
    objects, how = Objects(storage(), Kinds()), WriteOptions(manager="one")
    found: dict[str, Any] = {}
    for subresource, field in (("", "spec"), ("status", "status"), ("", "spec")):
        thing = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, field: {"x": subresource}}
        target = ResourcePath(POD_KIND, "default", "a", subresource)
        found = objects.patch(target, thing, "application/apply-patch+yaml", how)
    assert (found["spec"]["x"], found["status"]["x"]) == ("", "status")


def test_changes_are_remembered_and_then_forgotten() -> None:
    store, kind = storage(remembered=3), ServedKind(CONFIG_MAPS)
    began = store.version
    for number in range(3):
        store.create(kind, {"metadata": {"name": f"c{number}", "namespace": "default"}})
    assert [change.version for change in store.since(began)] == [began + 1, began + 2, began + 3]
    store.create(kind, {"metadata": {"name": "last", "namespace": "default"}})
    with pytest.raises(ApiError) as refused:
        store.since(began)
    assert refused.value.code == 410
    assert len(store.since(began + 1)) == 3


def test_a_bound_pod_is_marked_and_an_unbound_one_removed() -> None:
    store = storage()
    spec = {"containers": [], "terminationGracePeriodSeconds": 30}
    free = store.create(POD_KIND, {"metadata": {"name": "free", "namespace": "default"}, "spec": spec})
    store.delete(POD_KIND, free)
    assert store.find(POD_KIND, "default", "free") is None
    bound = {"metadata": {"name": "bound", "namespace": "default"}, "spec": {**spec, "nodeName": "n"}}
    marked = store.delete(POD_KIND, store.create(POD_KIND, bound))
    assert marked["metadata"]["deletionTimestamp"] == "2030-01-01T00:00:30Z"
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 30
    shorter = store.delete(POD_KIND, marked, grace_s=5)
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 5
    assert store.delete(POD_KIND, shorter, grace_s=20) is shorter
    store.delete(POD_KIND, shorter, grace_s=0)
    assert store.find(POD_KIND, "default", "bound") is None


def test_orphans_stay_and_what_is_in_a_namespace_goes_with_it() -> None:
    store, kind = storage(), ServedKind(CONFIG_MAPS)
    owner = store.create(kind, {"metadata": {"name": "owner", "namespace": "default"}})
    reference = {"uid": owner["metadata"]["uid"], "name": "owner"}
    metadata = {"name": "owned", "namespace": "default", "ownerReferences": [reference]}
    store.create(kind, {"metadata": metadata})
    store.delete(kind, owner, orphan=True)
    assert store.get(kind, "default", "owned")["metadata"]["ownerReferences"] == []
    store.delete(ServedKind(NAMESPACES), store.get(ServedKind(NAMESPACES), None, "default"))
    assert store.find(kind, "default", "owned") is None
