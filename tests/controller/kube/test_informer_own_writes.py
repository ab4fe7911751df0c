# SPDX-License-Identifier: Apache-2.0
"""A copy has our own writes as soon as the server has answered, whatever of it the watch shows before or after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.kube.api_resources import PODS
from controller.kube.client import WatchEvent
from controller.kube.informer import Store
from controller.kube.plan_executor import Expectations

if TYPE_CHECKING:
    import pytest

    from controller.kube.api_resources import ApiResource, Object

KEY = "n/a"


def pod(version: str, uid: str = "u", **more: Any) -> Object:  # noqa: ANN401 - JSON
    metadata = {"name": "a", "namespace": "n", "uid": uid, "resourceVersion": version}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **more}


class Copy:
    """One informer's store, and what is awaited in it."""

    def __init__(self, *things: Object) -> None:
        self.store = Store()
        self.store.replace(things)
        self.expectations = Expectations(self, patience_s=5.0)

    def get(self, _: ApiResource, key: str) -> Object | None:
        return self.store.objects.get(key)

    def apply_write_answer(self, _: ApiResource, thing: Object) -> None:
        self.store.apply_write_answer(thing)

    def hear(self, thing: Object, type_: str = "MODIFIED") -> list[str]:
        return self.store.apply_event(WatchEvent(type_, thing))

    @property
    def version(self) -> str | None:
        found = self.store.objects.get(KEY)
        return None if found is None else str(found["metadata"]["resourceVersion"])


def test_a_write_is_there_at_once_and_its_event_is_no_news() -> None:
    copy = Copy(pod("8"))
    copy.expectations.expect_write("work", PODS, pod("10"), 0.0)
    assert copy.version == "10"
    assert copy.expectations.remaining_wait_s("work", 0.0) is None
    assert copy.hear(pod("10")) == []


def test_events_from_before_a_write_change_nothing_and_later_ones_do() -> None:
    copy = Copy(pod("8"))
    assert copy.store.apply_write_answer(pod("10")) == [KEY]
    assert copy.hear(pod("9")) == []
    assert copy.version == "10"
    assert copy.hear(pod("11")) == [KEY]
    assert copy.version == "11"


def test_a_list_from_before_a_write_changes_nothing_and_what_it_lacks_is_gone() -> None:
    copy = Copy(pod("8"))
    copy.store.apply_write_answer(pod("10"))
    assert copy.store.replace([pod("9")]) == []
    assert copy.version == "10"
    assert copy.store.replace([]) == [KEY]
    assert copy.version is None


def test_what_somebody_else_has_written_since_stays() -> None:
    copy = Copy(pod("8"))
    copy.hear(pod("11", of="another"))
    copy.expectations.expect_write("work", PODS, pod("10", of="me"), 0.0)
    assert copy.store.objects[KEY]["of"] == "another"
    assert copy.expectations.remaining_wait_s("work", 0.0) is None


def test_what_is_gone_or_is_another_object_of_the_name_does_not_come_back() -> None:
    copy = Copy(pod("8"))
    copy.hear(pod("9"), "DELETED")
    assert copy.store.apply_write_answer(pod("10")) == []
    copy.hear(pod("12", uid="other"), "ADDED")
    assert copy.store.apply_write_answer(pod("13")) == []
    assert copy.version == "12"
    # an older number of another object is no older state
    assert copy.hear(pod("7", uid="third")) == [KEY]
    assert copy.version == "7"


def test_what_was_made_is_awaited_as_it_may_be_gone_already() -> None:
    copy = Copy()
    copy.expectations.expect_write("work", PODS, pod("10"), 0.0)
    assert copy.version is None
    assert copy.expectations.remaining_wait_s("work", 1.0) == 4.0
    copy.hear(pod("10"), "ADDED")
    assert copy.expectations.remaining_wait_s("work", 1.0) is None


def test_versions_that_are_no_numbers_are_left_to_the_watch() -> None:
    copy = Copy(pod("b"))
    copy.expectations.expect_write("work", PODS, pod("c"), 0.0)
    assert copy.version == "b"
    assert copy.expectations.remaining_wait_s("work", 1.0) == 4.0
    assert copy.hear(pod("a")) == [KEY]
    assert copy.hear(pod("c")) == [KEY]
    assert copy.expectations.remaining_wait_s("work", 1.0) is None


def test_an_answer_that_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(lambda thing: {**thing, "spec": thing["spec"]})
    store.replace([pod("8", spec=1)])
    assert store.apply_write_answer(pod("10")) == []
    assert store.objects[KEY]["spec"] == 1
    assert "cannot be read" in caplog.text


def test_an_answer_that_is_no_longer_selected_is_removed_by_the_watch() -> None:
    copy = Copy(pod("8"))
    copy.store.apply_write_answer(pod("10"))
    assert copy.hear(pod("10"), "DELETED") == [KEY]
    assert copy.version is None
