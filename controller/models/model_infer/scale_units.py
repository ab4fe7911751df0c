# SPDX-License-Identifier: Apache-2.0
"""One pod of each group carries the label by which autoscalers count groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.kube.plan import Annotate
from controller.kube.resources import PODS
from controller.models.model_infer import labels
from controller.models.model_infer.groups import entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.models.model_infer.changes import Missing
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.names import Place


def to_label(groups: Sequence[Group], missing: Sequence[Missing]) -> frozenset[Place]:
    """Which of the pods that are made carry it: the first entry pod of a group of which no pod does."""
    has_one = {one.ordinal for one in groups if any(pod.is_scale_unit for pod in one.pods)}
    found: dict[int, Place] = {}
    for one in missing:
        if one.place.index == 0 and one.place.group not in has_one:
            found.setdefault(one.place.group, one.place)
    return frozenset(found.values())


def corrected(groups: Sequence[Group], missing: Sequence[Missing]) -> Iterator[Annotate]:
    """Pods that get or lose the label, because the one that had it is gone for good, or two have it."""
    made = {one.group for one in to_label(groups, missing)}
    for group in groups:
        live = [one for one in entries(group.replicas) if not one.is_going]
        has = [one for one in live if one.is_scale_unit]
        for one in has[1:]:
            yield Annotate(PODS, one.key, one.uid, labels={labels.SCALE_UNIT: None})
        if live and group.ordinal not in made and not any(one.is_scale_unit for one in group.pods):
            yield Annotate(PODS, live[0].key, live[0].uid, labels={labels.SCALE_UNIT: "true"})
