# SPDX-License-Identifier: Apache-2.0
"""The client's small parts: paths, label selectors, errors, waits, the events of a watch, a copy of objects."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.kube.api_resources import (
    DEPLOYMENTS,
    NODES,
    PODS,
    ApiResource,
    key_of,
    parse_selector,
    required_labels,
    split_key,
)
from controller.kube.client import WatchEvent, decode_watch_events
from controller.kube.errors import (
    AlreadyExists,
    ApiError,
    Backoff,
    Conflict,
    ResourceVersionExpired,
    ServerError,
    TooManyRequests,
    Unreachable,
    error_for,
)
from controller.kube.informer import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def thing(name: str, version: str, uid: str = "u", namespace: str | None = "default") -> dict[str, Any]:
    metadata = {"name": name, "resourceVersion": version, "uid": uid}
    return {"metadata": metadata if namespace is None else {**metadata, "namespace": namespace}}


def test_paths_are_those_of_the_api() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("a", "b", "status") == "/api/v1/namespaces/a/pods/b/status"
    assert DEPLOYMENTS.path("a") == "/apis/apps/v1/namespaces/a/deployments"
    assert NODES.path(None, "n") == "/api/v1/nodes/n"
    assert PODS.path("a/../b", "c?d") == "/api/v1/namespaces/a%2F..%2Fb/pods/c%3Fd"
    with pytest.raises(ValueError, match="needs a namespace"):
        PODS.path(None, "b")


def test_keys_have_a_namespace_where_objects_have() -> None:
    assert key_of(thing("a", "1")) == "default/a"
    assert key_of(thing("a", "1", namespace=None)) == "a"
    assert split_key("default/a") == ("default", "a")
    assert split_key("a") == (None, "a")


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "ResourceVersionExpired", ResourceVersionExpired),
        (503, "", ServerError),
    ],
)
def test_answers_become_errors(status: int, reason: str, kind: type[ApiError]) -> None:
    error = error_for(status, f'{{"reason": "{reason}", "message": "m"}}'.encode())
    assert type(error) is kind
    assert (error.status, error.reason, error.message, error.retry_after_s) == (status, reason, "m", None)


def test_what_a_proxy_says_is_kept() -> None:
    error = error_for(502, b"<html>bad gateway")
    assert isinstance(error, ServerError)
    assert "bad gateway" in str(error)
    assert type(error_for(418, b"")) is ApiError


def test_the_server_says_when_to_come_again() -> None:
    assert error_for(429, b"{}", "7").retry_after_s == 7
    assert error_for(429, b'{"details": {"retryAfterSeconds": 3}}').retry_after_s == 3
    assert error_for(429, b"{}", "tomorrow").retry_after_s is None


def test_waits_double_and_are_spread() -> None:
    backoff = Backoff(1.0, 8.0, Random(1))
    for most in (1, 2, 4, 8, 8):
        assert most / 2 <= backoff.record_failure() <= most
    backoff.reset()
    assert backoff.record_failure() <= 1


def test_a_wait_is_never_shorter_than_the_server_asked() -> None:
    backoff = Backoff(1.0, 8.0, Random(1))
    assert 7 <= backoff.record_failure(TooManyRequests(429, retry_after_s=7)) <= 8
    assert backoff.record_failure(Unreachable("gone")) <= 2


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(0, 5))
def test_events_survive_any_cutting(lengths: list[int], count: int) -> None:
    whole = b"".join(
        b'{"type":"ADDED","object":{"metadata":{"name":"%d","resourceVersion":"1"}}}\n' % number
        for number in range(count)
    )

    async def chunks() -> AsyncIterator[bytes]:
        rest = whole + b'{"type":"ADD'  # a broken connection leaves the beginning of a line
        for length in lengths:
            yield rest[:length]
            rest = rest[length:]
        yield rest

    assert [event.object["metadata"]["name"] for event in drained(chunks())] == [str(one) for one in range(count)]


def drained(chunks: AsyncIterator[bytes]) -> list[WatchEvent]:
    """All events; nothing in it waits, so no event loop is needed."""
    found: list[WatchEvent] = []

    async def collect() -> None:
        found.extend([event async for event in decode_watch_events(chunks)])

    with pytest.raises(StopIteration):
        collect().send(None)
    return found


async def test_an_error_in_a_watch_is_raised() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"type":"ERROR","object":{"code":410,"reason":"Expired","message":"too old"}}\n'

    with pytest.raises(ResourceVersionExpired, match="too old"):
        await anext(decode_watch_events(chunks()))


def event(kind: str, one: dict[str, Any]) -> WatchEvent:
    return WatchEvent(kind, one)


def test_a_list_tells_what_came_changed_and_went() -> None:
    store = Store()
    assert store.replace([thing("a", "1"), thing("b", "2")]) == ["default/a", "default/b"]
    again = [thing("a", "1"), thing("b", "3"), thing("c", "4")]
    assert store.replace(again) == ["default/b", "default/c"]
    assert store.replace([thing("c", "4", uid="another")]) == ["default/c", "default/a", "default/b"]
    assert list(store.objects) == ["default/c"]


def test_an_event_tells_what_it_changed() -> None:
    store = Store()
    assert store.apply_event(event("ADDED", thing("a", "1"))) == ["default/a"]
    assert store.apply_event(event("ADDED", thing("a", "1"))) == [], "sent again after a gap"
    assert store.apply_event(event("MODIFIED", thing("a", "2"))) == ["default/a"]
    assert store.apply_event(event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})) == []
    assert store.apply_event(event("DELETED", thing("a", "3"))) == ["default/a"]
    assert store.apply_event(event("DELETED", thing("a", "3"))) == []


def test_objects_can_be_made_smaller_before_they_are_kept() -> None:
    store = Store(lambda one: {"metadata": one["metadata"]})
    store.replace([{**thing("a", "1"), "spec": "large"}])
    store.apply_event(event("ADDED", {**thing("b", "2"), "spec": "large"}))
    assert [list(one) for one in store.objects.values()] == [["metadata"], ["metadata"]]


def test_an_object_that_cannot_be_read_stays_as_it_was_and_harms_no_other() -> None:
    def careful(one: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": one["metadata"], "size": int(one.get("size", "1"))}

    store, bad = Store(careful), {**thing("a", "2"), "size": "much"}
    assert store.replace([{**thing("new", "1"), "size": "much"}, thing("a", "1"), thing("b", "1")]) == [
        "default/a",
        "default/b",
    ]
    assert store.apply_event(event("MODIFIED", bad)) == []
    assert store.objects["default/a"]["metadata"]["resourceVersion"] == "1"
    assert store.replace([bad, thing("b", "2")]) == ["default/b"]
    assert store.objects["default/a"]["size"] == 1
    assert store.apply_event(event("MODIFIED", thing("a", "3"))) == ["default/a"]
    assert store.apply_event(event("DELETED", bad)) == ["default/a"]


@pytest.mark.parametrize("part", ["..", "."])
def test_no_part_of_a_path_leads_elsewhere(part: str) -> None:
    with pytest.raises(ValueError, match="no part of a path"):
        PODS.path("a", part)
    with pytest.raises(ValueError, match="no part of a path"):
        PODS.path(part, "a")
    for resource in (ApiResource(part, "v1", "x", "X"), ApiResource("apps", part, "x", "X")):
        with pytest.raises(ValueError, match="no part of a path"):
            _ = resource.group_path


def test_the_copy_cannot_be_changed_by_its_readers() -> None:
    store = Store()
    with pytest.raises(TypeError):
        store.objects["x"] = {}  # type: ignore[index]


def test_labels_with_one_value_are_required() -> None:
    text = "app=llama, tier==gpu,zone in (a),rack in (a,b),kind!=x,!gone,there,of notin (y)"
    assert required_labels(text) == {"app": "llama", "tier": "gpu", "zone": "a"}


def test_all_terms_have_to_match() -> None:
    matches = parse_selector("app=llama,rack in (a, b),!gone")
    assert matches({"app": "llama", "rack": "b"})
    assert not matches({"app": "llama", "rack": "c"})
    assert not matches({"app": "llama", "rack": "a", "gone": ""})


@pytest.mark.parametrize("text", ["a in b", "(", "a=b c=d"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unable to parse"):
        required_labels(text)
