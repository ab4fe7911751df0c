# SPDX-License-Identifier: Apache-2.0
"""Random ModelInfers, as a user may write them, and what their pods must be made of."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from tests.virtual_cluster.engine_pod import GOOD

ROLES = ("prefill", "decode", "route")
Spec = dict[str, Any]

counts = st.integers(0, 3)
budgets = st.sampled_from([0, 1, 2, "25%", "50%", "100%"])


def pod_template(image: str) -> dict[str, Any]:
    """An engine with one GPU."""
    container = {
        "name": "engine",
        "image": image,
        "readinessProbe": {"httpGet": {"port": 8000, "path": "/health"}},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    return {"spec": {"containers": [container]}}


def role(name: str, replicas: int, workers: int) -> dict[str, Any]:
    """``workers``: pods beside the entry pod."""
    found: dict[str, Any] = {
        "name": name,
        "replicas": replicas,
        "workerReplicas": workers,
        "entryTemplate": pod_template(GOOD),
    }
    return {**found, "workerTemplate": pod_template(GOOD)} if workers else found


@st.composite
def specs(draw: st.DrawFn, *, most_roles: int = 3, most_groups: int = 4) -> Spec:
    """Of good images."""
    roles: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, most_roles))):
        one = role(ROLES[number], draw(st.integers(1, 2)), draw(st.sampled_from([0, 0, 1, 2])))
        if number and draw(st.booleans()):
            one["startsAfter"] = [ROLES[draw(st.integers(0, number - 1))]]
        if draw(st.booleans()):
            one |= draw(role_budgets())
        roles.append(one)
    template: dict[str, Any] = {
        "roles": roles,
        "drainTimeout": draw(st.sampled_from(["5m", "30s", "0s"])),
        "restartGracePeriod": draw(st.sampled_from(["0s", "30s", "2m"])),
    }
    if draw(st.sampled_from([False, False, True])):
        template["gang"] = {"timeout": draw(st.sampled_from(["10m", "1m"]))}
    return {
        "replicas": draw(st.integers(1, most_groups)),
        "recovery": draw(st.sampled_from(["Role", "Group", "Pod", "None"])),
        "template": template,
        "rollout": draw(rollouts()),
        "revisionHistoryLimit": draw(st.sampled_from([10, 1, 0])),
    }


@st.composite
def role_budgets(draw: st.DrawFn) -> dict[str, Any]:
    """Of the replicas of a role."""
    return {"maxUnavailable": draw(st.sampled_from([1, "50%"])), "maxSurge": draw(st.sampled_from([0, 1]))}


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, Any]:
    """Strategies that let a rollout end."""
    unavailable, surge = draw(budgets), draw(st.sampled_from([0, 1, 2, "50%"]))
    if str(unavailable).rstrip("%") == "0" and str(surge).rstrip("%") == "0":
        surge = 1
    return {
        "unit": draw(st.sampled_from(["Group", "Role"])),
        "maxUnavailable": unavailable,
        "maxSurge": surge,
        "progressDeadline": draw(st.sampled_from(["30m", "5m"])),
        "onFailure": draw(st.sampled_from(["Stop", "RollBack"])),
    }


def simple(**fields: object) -> Spec:
    """Two groups of a prefill and two decode engines, those with a worker each."""
    rollout = {"maxUnavailable": 1, "maxSurge": 0, "unit": "Group", "progressDeadline": "5m", "onFailure": "Stop"}
    template = {"roles": [role("prefill", 1, 0), role("decode", 2, 1)], "drainTimeout": "30s"}
    return {"replicas": 2, "recovery": "Role", "template": template, "rollout": rollout, **fields}


def with_image(spec: Spec, numbers: frozenset[int], image: str) -> Spec:
    """The entry and worker pods of the roles with these numbers (all roles, if they name none) get another image."""
    new = copy.deepcopy(spec)
    roles = new["template"]["roles"]
    chosen = [one for number, one in enumerate(roles) if number in numbers] or roles
    for one in chosen:
        for name in ("entryTemplate", "workerTemplate"):
            if name in one:
                one[name] = pod_template(image)
    return new


def role_of(spec: Spec, name: str) -> dict[str, Any] | None:
    """The role of this name."""
    found: list[dict[str, Any]] = spec["template"]["roles"]
    return next((one for one in found if one["name"] == name), None)


def image_of(spec: Spec, name: str, index: int) -> str:
    """What the pod with this index in a replica of a role runs."""
    one = role_of(spec, name)
    assert one is not None
    template = one["entryTemplate"] if index == 0 else one["workerTemplate"]
    return str(template["spec"]["containers"][0]["image"])


def duration_s(text: str) -> float:
    """``5m``."""
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def resolved(value: int | str, whole: int, *, up: bool) -> int:
    """A number, or a share of ``whole``."""
    if isinstance(value, int):
        return value
    hundredths = int(value[:-1]) * whole
    return -(-hundredths // 100) if up else hundredths // 100


def group_budget(spec: Spec) -> tuple[int, int]:
    """How many groups may be missing, and how many there may be beyond ``replicas``: as Kubernetes rounds them."""
    rollout, replicas = spec.get("rollout") or {}, spec["replicas"]
    unavailable = resolved(rollout.get("maxUnavailable", 1), replicas, up=False)
    surge = resolved(rollout.get("maxSurge", 0), replicas, up=True)
    return (1, 0) if unavailable == surge == 0 else (unavailable, surge)
