# SPDX-License-Identifier: Apache-2.0
"""What is awaited of our own writes, and when it is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.kube.api_resources import MODEL_INFERS, PODS, key_of
from controller.kube.plan_executor import Expectations

if TYPE_CHECKING:
    from controller.kube.api_resources import ApiResource, Object


class Copies:
    """What informers have, which have not had the objects that are written."""

    def __init__(self) -> None:
        self.objects: dict[tuple[ApiResource, str], Object] = {}
        self.expectations = Expectations(self, patience_s=5.0)

    def get(self, resource: ApiResource, key: str) -> Object | None:
        return self.objects.get((resource, key))

    def apply_write_answer(self, resource: ApiResource, thing: Object) -> None:
        """Left to the watch."""

    def hear(self, thing: Object, resource: ApiResource = PODS) -> None:
        self.objects[resource, key_of(thing)] = thing
        self.expectations.on_object_observed(resource, key_of(thing))

    def lose(self, thing: Object, resource: ApiResource = PODS) -> None:
        del self.objects[resource, key_of(thing)]
        self.expectations.on_object_observed(resource, key_of(thing))


def pod(version: str, uid: str = "u", **more: Any) -> Object:  # noqa: ANN401 - JSON
    return {"metadata": {"name": "a", "namespace": "n", "uid": uid, "resourceVersion": version, **more}}


def test_a_write_is_awaited_until_a_copy_is_as_new() -> None:
    copies = Copies()
    copies.hear(pod("8"))
    copies.expectations.expect_write("work", PODS, pod("10"), 100.0)
    assert copies.expectations.remaining_wait_s("work", 101.0) == 4.0
    copies.hear(pod("9"))
    assert copies.expectations.remaining_wait_s("work", 102.0) == 3.0
    copies.hear(pod("11"))
    assert copies.expectations.remaining_wait_s("work", 103.0) is None


def test_versions_that_are_no_numbers_are_compared_exactly() -> None:
    copies = Copies()
    copies.expectations.expect_write("work", PODS, pod("b"), 0.0)
    copies.hear(pod("c"))
    assert copies.expectations.remaining_wait_s("work", 1.0) == 4.0
    copies.hear(pod("b"))
    assert copies.expectations.remaining_wait_s("work", 1.0) is None


def test_what_was_seen_once_may_be_gone_by_the_next_look() -> None:
    copies = Copies()
    copies.expectations.expect_write("work", PODS, pod("10"), 0.0)
    copies.hear(pod("10"))
    copies.lose(pod("10"))
    assert copies.expectations.remaining_wait_s("work", 1.0) is None


def test_a_deletion_is_seen_as_a_mark_as_an_absence_or_as_another_object() -> None:
    for then in (pod("11", deletionTimestamp="2026-11-01T00:00:00Z"), None, pod("12", uid="other")):
        copies = Copies()
        copies.hear(pod("10"))
        copies.expectations.expect_deletion("work", PODS, "n/a", "u", 0.0)
        assert copies.expectations.remaining_wait_s("work", 1.0) == 4.0
        if then is None:
            copies.lose(pod("10"))
        else:
            copies.hear(then)
        assert copies.expectations.remaining_wait_s("work", 1.0) is None


def test_patience_ends_and_works_are_apart() -> None:
    copies = Copies()
    copies.expectations.expect_write("late", PODS, pod("10"), 0.0)
    copies.expectations.expect_write("other", MODEL_INFERS, pod("10"), 3.0)
    assert copies.expectations.remaining_wait_s("late", 60.0) == 0.0
    copies.expectations.forget("late")
    assert copies.expectations.remaining_wait_s("late", 60.0) is None
    assert copies.expectations.remaining_wait_s("other", 4.0) == 4.0
    copies.hear(pod("10"), MODEL_INFERS)
    assert copies.expectations.remaining_wait_s("other", 4.0) is None
    assert not copies.expectations._about
