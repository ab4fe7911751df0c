# SPDX-License-Identifier: Apache-2.0
"""Pods of a selector, whatever comes and goes."""

from __future__ import annotations

from random import Random

import msgspec

from controller.autoscaler.reconciler.informers import PodIndex
from controller.kube.pod_views import PodView


def pod(namespace: str, name: str, **labels: str) -> PodView:
    key = f"{namespace}/{name}"
    return PodView(key=key, name=name, uid=key, labels=labels, ip="", created_at_s=0.0)


def test_it_finds_what_a_look_at_all_pods_finds() -> None:
    rng, index, known = Random(1), PodIndex(), dict[str, PodView]()
    for step in range(2000):
        one = pod(rng.choice("ab"), str(rng.randrange(40)), app=rng.choice("xyz"), role=rng.choice("pq"))
        if rng.random() < 0.3:
            known.pop(one.key, None)
            index.set_pod(one.key, None)
        else:
            known[one.key] = one
            index.set_pod(one.key, one)
        selector = {"app": rng.choice("xyz"), **({"role": "p"} if step > 500 and rng.random() < 0.5 else {})}
        wanted = [
            each
            for key, each in sorted(known.items())
            if key.startswith("a/") and selector.items() <= dict(each.labels).items()
        ]
        assert index.find_pods("a", selector) == wanted


def test_nothing_is_selected_by_nothing() -> None:
    index = PodIndex()
    index.set_pod("a/1", pod("a", "1"))
    assert index.find_pods("a", {}) == []
    assert index.find_pods("a", {"app": "x"}) == []
    index.set_pod("a/1", msgspec.structs.replace(pod("a", "1"), labels={"app": "x"}))
    assert [one.name for one in index.find_pods("a", {"app": "x"})] == ["1"]


def test_what_is_not_in_it_changes_nothing_when_it_goes() -> None:
    index = PodIndex()
    index.set_pod("a/1", pod("a", "1", app="x"))
    version = index.version
    index.set_pod("b/1", None)
    assert index.version == version
    index.set_pod("a/1", None)
    assert (index.version, index.find_pods("a", {"app": "x"})) == (version + 1, [])
