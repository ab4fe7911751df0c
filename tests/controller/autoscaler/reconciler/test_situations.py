# SPDX-License-Identifier: Apache-2.0
"""From targets as they were resolved to situations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.reconciler.demand import DemandView
from controller.autoscaler.reconciler.scalables import Scalable, find_scalable_kind
from controller.autoscaler.reconciler.situations import build_situations, with_headroom
from controller.autoscaler.reconciler.target_resolver import ResolvedTarget
from controller.kube.api_resources import DEPLOYMENTS
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.situations import NOW_S, spec_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def resolved(name: str, start_time: str) -> ResolvedTarget:
    spec = msgspec.structs.replace(spec_of(name), start_time=Duration(start_time))
    found = Scalable(
        resource=DEPLOYMENTS, key=f"default/{name}", uid="u", version="1", replicas=2, selector={}, template={}
    )
    place = ("default", "apps", "Deployment", name)
    return ResolvedTarget(spec=spec, place=place, kind=find_scalable_kind("apps", "Deployment"), found=found)


def test_before_any_start_the_target_says_how_long_one_takes() -> None:
    targets = [resolved("a", "4m"), resolved("b", "60s")]
    (found,) = build_situations(targets, AutoscalingPolicySpec(), lambda _: DemandView(), NOW_S, holds={})
    assert [one.start_s for one in found.targets] == [240.0, 60.0]
    (limited,) = with_headroom([found], {"a": 3}, {"a": ("H100 or h100",)})
    assert [one.headroom for one in limited.targets] == [3, None]
    assert [one.pools for one in limited.targets] == [("H100 or h100",), None]


def test_demand_is_read_of_all_servers_of_the_targets() -> None:
    asked: list[list[str]] = []

    def view(servers: Sequence[str]) -> DemandView:
        asked.append(list(servers))
        return DemandView()

    first, second, unknown = (resolved(name, "60s") for name in "abc")
    first = msgspec.structs.replace(first, server="default/b", twins=("default/b.grpc",))
    second = msgspec.structs.replace(second, server="default/a")
    build_situations([first, second, unknown], AutoscalingPolicySpec(), view, NOW_S, holds={})
    assert asked == [["default/a", "default/b", "default/b.grpc"]]
