# SPDX-License-Identifier: Apache-2.0
"""Plugin types of earlier releases, which llm-d has replaced since: files that name them still work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage, estimated_waiting
from extproc.refusals import BadRequest
from extproc.scheduling.endpoint_masks import rows_running_adapter
from extproc.scheduling.framework import Filter
from extproc.scheduling.plugins.latency import LatencyScorer, hashed_uniforms

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.framework import PrefillDecider, Profile
    from extproc.scheduling.picker import Pick, View

_PREDICTION_HEADER = "x-prediction-based-scheduling"
# Of a hash of the request's time, apart from the other draws of the same request.
_LORA_STREAM = 7


class LowQueueFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``low-queue-filter`` of the Inference Extension up to 0.5: at most ``threshold`` requests wait in the engine."""

    threshold: Annotated[int, msgspec.Meta(ge=0)] = 128

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if all queues are long."""
        return candidates & (estimated_waiting(view.table, view.now_s) <= self.threshold)


class LeastQueueFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``least-queue-filter`` of the Inference Extension up to 0.5: the shortest queues.

    The range from the shortest to the longest is divided by the number of endpoints; those in the first part stay.
    """

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps at least the shortest queue."""
        return _first_part(estimated_waiting(view.table, view.now_s), candidates)


class LeastKvCacheFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``least-kv-cache-filter`` of the Inference Extension up to 0.5: as ``least-queue-filter``, by the KV cache's
    usage.
    """

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps at least the emptiest cache."""
        return _first_part(estimated_kv_usage(view.table, view.now_s), candidates)


def _first_part(values: Floats, candidates: Bools) -> Bools:
    if not candidates.any():
        return candidates
    inside = values[candidates]
    least = float(inside.min())
    kept: Bools = candidates & (values <= least + (float(inside.max()) - least) / inside.size)
    return kept


class LoraSoftAffinityFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``lora-affinity-filter`` of the Inference Extension up to 0.5: endpoints with the adapter, else with room for it.

    If there are both, the filter keeps those with the adapter, except for a share ``1 - threshold`` of the requests.
    """

    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.999

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if the request names no adapter, or if none has it or room for it."""
        adapter = view.request.adapter
        if adapter is None:
            return candidates
        has_it = candidates & rows_running_adapter(view.table, adapter)
        room = candidates & ~has_it
        for row in room.nonzero()[0]:
            loras = view.table.loras[row]
            room[row] = len(loras.active | loras.waiting) < loras.max_active
        if has_it.any() and room.any():
            return has_it if hashed_uniforms(view.now_s, 1, stream=_LORA_STREAM)[0] < self.threshold else room
        either: Bools = has_it | room
        return either if either.any() else candidates


class DecisionTreeParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``decision-tree-filter`` of the Inference Extension up to 0.5: a filter, and what follows it.

    ``current`` names a filter, or is a tree. If it keeps endpoints, ``nextOnSuccess`` goes on with them, otherwise
    ``nextOnFailure`` with all there were; ``nextOnSuccessOrFailure`` stands for a missing one.
    """

    current: dict[str, Any]
    next_on_success: dict[str, Any] | None = None
    next_on_failure: dict[str, Any] | None = None
    next_on_success_or_failure: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if a step is neither the name of a filter nor a tree."""
        for step in (self.current, self.next_on_success, self.next_on_failure, self.next_on_success_or_failure):
            if step is None:
                continue
            if isinstance(step.get("decisionTree"), dict):
                msgspec.convert(step["decisionTree"], DecisionTreeParameters)
            elif not isinstance(step.get("pluginRef"), str):
                raise ValueError("a step of a decision tree has either 'pluginRef' or 'decisionTree'")

    def with_plugins(self, others: Mapping[str, Any]) -> DecisionTreeFilter:
        """With the filters that it names."""

        def step(of: dict[str, Any] | None) -> Filter | None:
            if of is None:
                return None
            tree = of.get("decisionTree")
            if tree is not None:
                return msgspec.convert(tree, DecisionTreeParameters).with_plugins(others)
            found = others.get(of["pluginRef"], _Everything())
            return found if hasattr(found, "keep") else _Everything()

        either = self.next_on_success_or_failure
        return DecisionTreeFilter(
            step(self.current) or _Everything(),
            step(self.next_on_success or either),
            step(self.next_on_failure or either),
        )


class _Everything(msgspec.Struct, frozen=True):
    def keep(self, view: View, candidates: Bools) -> Bools:
        del view
        return candidates


class DecisionTreeFilter(msgspec.Struct, frozen=True):
    """The filter: one step of the tree, and what follows it."""

    current: Filter
    on_success: Filter | None
    on_failure: Filter | None

    def keep(self, view: View, candidates: Bools) -> Bools:
        """What the last step leaves."""
        kept = candidates & self.current.keep(view, candidates)
        if kept.any():
            return kept if self.on_success is None else self.on_success.keep(view, kept)
        return kept if self.on_failure is None else self.on_failure.keep(view, candidates)


class SloAwareScorer(LatencyScorer, frozen=True):
    """``slo-aware-routing`` and ``slo-scorer`` of the Inference Extension up to 1.2: ``latency-scorer``."""

    TOLD: ClassVar = "as latency-scorer, with what it learned of each endpoint; no predictor is asked"


class SloAwareProfileHandler(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``slo-aware-profile-handler`` of the Inference Extension up to 1.2.

    Runs the profile ``slo`` for a request with ``x-prediction-based-scheduling: true``, else ``default``. The profile
    ``prefix``, which only filled an index there, is not run.
    """

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """An error message if one of the two profiles is missing."""
        missing = [name for name in ("default", "slo") if name not in profiles]
        return f"there is no profile '{missing[0]}'; add it to schedulingProfiles" if missing else None

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """Run the profile; raises BadRequest if the header is neither true nor false."""
        del deciders
        text = view.request.headers.get(_PREDICTION_HEADER, "false").strip().lower()
        if text not in {"true", "t", "1", "false", "f", "0"}:
            raise BadRequest(f"The header '{_PREDICTION_HEADER}' is '{text[:40]}'; write true or false.")
        return profiles["slo" if text in {"true", "t", "1"} else "default"].pick(view, rng=rng)


class HeaderBasedTestingFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``header-based-testing-filter`` of conformance tests: the endpoints in ``test-epp-endpoint-selection``.

    The header has their addresses, with or without a port, separated by commas.
    """

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint without the header."""
        named = {one.strip() for one in view.request.headers.get("test-epp-endpoint-selection", "").split(",")} - {""}
        hosts = [{one, one.rpartition(":")[0].strip("[]")} for one in view.table.addresses]
        return candidates & np.fromiter((bool(one & named) for one in hosts), np.bool_, candidates.size)
