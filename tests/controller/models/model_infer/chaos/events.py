# SPDX-License-Identifier: Apache-2.0
"""What may happen in a history: to the object, to engines and nodes, to the API, to the manager."""

from __future__ import annotations

from typing import Literal

import msgspec
from hypothesis import strategies as st

from controller.kube.api_resources import CONTROLLER_REVISIONS, MODEL_INFER_ROLES, SERVICES
from tests.virtual_cluster.engine_pod import CRASHES, GOOD, MISSING, NEVER_READY

DRIFTING = (SERVICES, CONTROLLER_REVISIONS, MODEL_INFER_ROLES)
numbers = st.integers(0, 30)
roles = st.frozensets(st.integers(0, 2), max_size=2)


class Scale(msgspec.Struct, frozen=True):
    """The user, or an autoscaler, wants so many groups."""

    replicas: int


class NewImage(msgspec.Struct, frozen=True):
    """The user changes the template of some roles (of all, without any)."""

    image: str
    roles: frozenset[int]


class Resize(msgspec.Struct, frozen=True):
    """The user wants more or fewer replicas of a role, or workers of each replica."""

    role: int
    replicas: int | None = None
    workers: int | None = None


class GoBack(msgspec.Struct, frozen=True):
    """The user restores the template of before."""


class Set(msgspec.Struct, frozen=True):
    """The user changes fields of the spec or the rollout."""

    field: Literal["paused", "partition", "maxUnavailable", "maxSurge", "unit", "recovery"]
    value: object


class Harm(msgspec.Struct, frozen=True):
    """Something befalls one of the pods that run."""

    kind: Literal["crash", "hang", "evict", "deleted by the user"]
    number: int


class LoseNode(msgspec.Struct, frozen=True):
    """A node is gone, for ever without ``back_after_s``."""

    number: int
    back_after_s: float | None
    rebooted: bool


class KillManager(msgspec.Struct, frozen=True):
    """The manager dies after so many more calls, or in the middle of the next."""

    calls: int
    back_after_s: float


class Ill(msgspec.Struct, frozen=True):
    """The API server refuses calls or loses answers for a while."""

    refused: float
    lost: float
    for_s: float


class Late(msgspec.Struct, frozen=True):
    """The watch of a kind is late for a while."""

    plural: str
    lag_s: float
    for_s: float


class Silent(msgspec.Struct, frozen=True):
    """Gateways tell no loads for a while."""

    for_s: float


class Drift(msgspec.Struct, frozen=True):
    """Somebody deletes something that the ModelInfer owns."""

    plural: Literal["services", "controllerrevisions", "modelinferroles"]
    number: int


class Remake(msgspec.Struct, frozen=True):
    """The user deletes the object and makes it anew a while later."""

    after_s: float


class Wait(msgspec.Struct, frozen=True):
    """Nothing happens for a while."""

    for_s: float


Event = (
    Scale
    | NewImage
    | Resize
    | GoBack
    | Set
    | Harm
    | LoseNode
    | KillManager
    | Ill
    | Late
    | Silent
    | Drift
    | Remake
    | Wait
)

images = st.one_of(
    st.integers(1, 4).map(lambda number: f"{GOOD}-{number}"), st.sampled_from([CRASHES, NEVER_READY, MISSING])
)
waits = st.sampled_from([1.0, 0.03, 10.0, 60.0, 300.0, 2000.0]).map(Wait)
_sets = st.one_of(
    st.builds(Set, st.just("paused"), st.booleans()),
    st.builds(Set, st.just("partition"), st.sampled_from([0, 1, 2, "50%"])),
    st.builds(Set, st.just("maxUnavailable"), st.sampled_from([1, 2, "50%"])),
    st.builds(Set, st.just("maxSurge"), st.sampled_from([1, 2, "50%"])),
    st.builds(Set, st.just("unit"), st.sampled_from(["Group", "Role"])),
    st.builds(Set, st.just("recovery"), st.sampled_from(["Role", "Group", "Pod", "None"])),
)
of_the_user = st.one_of(
    st.builds(Scale, st.integers(0, 5)),
    st.builds(NewImage, images, roles),
    st.builds(NewImage, images, roles),
    st.builds(Resize, st.integers(0, 2), replicas=st.integers(0, 2)),
    st.builds(Resize, st.integers(0, 2), workers=st.integers(0, 2)),
    st.just(GoBack()),
    _sets,
)
of_the_manager = st.one_of(
    st.builds(KillManager, st.integers(0, 12), st.sampled_from([1.0, 15.0, 200.0])),
    st.builds(
        Ill, st.sampled_from([0.0, 0.2, 0.6]), st.sampled_from([0.0, 0.2, 0.5]), st.sampled_from([2.0, 30.0, 200.0])
    ),
    st.builds(
        Late,
        st.sampled_from(["pods", "modelinfers", "nodes", "controllerrevisions", "services"]),
        st.sampled_from([2.0, 10.0]),
        st.sampled_from([10.0, 100.0]),
    ),
    st.builds(Silent, st.sampled_from([10.0, 400.0])),
)
of_the_cluster = st.one_of(
    st.builds(Harm, st.sampled_from(["crash", "hang", "evict", "deleted by the user"]), numbers),
    st.builds(Harm, st.sampled_from(["crash", "hang", "evict", "deleted by the user"]), numbers),
    st.builds(LoseNode, numbers, st.sampled_from([20.0, 120.0, 600.0, None]), st.booleans()),
    st.builds(Drift, st.sampled_from(["services", "controllerrevisions", "modelinferroles"]), numbers),
)
remakes = st.builds(Remake, st.sampled_from([0.1, 5.0, 100.0]))

calm_events = st.one_of(of_the_user, waits, of_the_manager)
wild_events = st.one_of(of_the_user, waits, of_the_manager, of_the_cluster, of_the_cluster, remakes)
