# SPDX-License-Identifier: Apache-2.0
"""Filter and scorer by a number that engines report: a metric of their own, by the name that a file gives it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from extproc.scheduling.plugins.ineffective_parameters import ONE_SOURCE

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
_OPERATORS: Final = {
    "LessThan": np.less,
    "LessThanOrEqual": np.less_equal,
    "GreaterThan": np.greater,
    "GreaterThanOrEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
}


class ThresholdFilterParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Keeps endpoints whose value has the relation ``operator`` to ``value``."""

    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float


class RangeFilterParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Keeps endpoints with a value from ``min`` to ``max``."""

    min: float
    max: float

    def __post_init__(self) -> None:
        """Raises ValueError if nothing can be in it."""
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}; exchange them")


class TopKFilterParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Keeps the ``k`` endpoints with the highest values, or the lowest."""

    k: Annotated[int, msgspec.Meta(ge=1)]
    higher_is_better: bool = True


class PercentileFilterParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Keeps endpoints at or above the value of rank ``ceil(percentile / 100 * N)``, or at or below it."""

    percentile: Annotated[float, msgspec.Meta(ge=0, le=100)]
    higher_is_better: bool = True


class FilterAlgorithm(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How to filter: ``type``, and the section of that name."""

    type: Literal["threshold", "range", "topK", "percentile"]
    threshold: ThresholdFilterParameters | None = None
    range: RangeFilterParameters | None = None
    top_k: TopKFilterParameters | None = msgspec.field(default=None, name="topK")
    percentile: PercentileFilterParameters | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the section is missing."""
        if self.chosen is None:
            raise ValueError(f"algorithm.{self.type} is missing; add what type: {self.type} needs")

    @property
    def chosen(
        self,
    ) -> ThresholdFilterParameters | RangeFilterParameters | TopKFilterParameters | PercentileFilterParameters | None:
        """The section that ``type`` names."""
        chosen: (
            ThresholdFilterParameters | RangeFilterParameters | TopKFilterParameters | PercentileFilterParameters | None
        ) = getattr(self, "top_k" if self.type == "topK" else self.type)
        return chosen


class EndpointAttributeFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``endpoint-attribute-filter``: endpoints by the value of one attribute, compared, in a range, or ranked.

    ``onMissing``: whether endpoints without a value pass. ``fallbackOnEmpty``: keep all if none is left. Attributes are
    the ``customMetrics`` of a ``core-metrics-extractor``; other producers have none here.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"producer": ONE_SOURCE})

    attribute: NonEmpty
    algorithm: FilterAlgorithm
    on_missing: Literal["", "Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the endpoints that satisfy the algorithm."""
        values = view.table.attributes.column(self.attribute, candidates.size)
        known = candidates & ~np.isnan(values)
        kept = known & _satisfies(values, known, self.algorithm)
        if self.on_missing != "Fail":
            kept = kept | (candidates & ~known)
        return candidates if self.fallback_on_empty and not kept.any() else kept


def _satisfies(values: Floats, known: Bools, algorithm: FilterAlgorithm) -> Bools:
    match algorithm.chosen:
        case ThresholdFilterParameters(operator=operator, value=value):
            compared: Bools = _OPERATORS[operator](values, value)
            return compared
        case RangeFilterParameters(min=least, max=most):
            within: Bools = (values >= least) & (values <= most)
            return within
        case TopKFilterParameters(k=k, higher_is_better=is_higher):
            rows = known.nonzero()[0]
            ranked = rows[(-values[rows] if is_higher else values[rows]).argsort(kind="stable")[:k]]
            best: Bools = np.zeros(values.size, np.bool_)
            best[ranked] = True
            return best
        case PercentileFilterParameters(percentile=percentile, higher_is_better=is_higher):
            ordered = np.sort(values[known])
            if not ordered.size:
                return known
            # nearest rank, from 1
            cutoff = ordered[max(1, int(np.ceil(percentile / 100 * ordered.size))) - 1]
            beyond: Bools = values >= cutoff if is_higher else values <= cutoff
            return beyond
        case None:
            return known


class FixedRange(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Values from ``min`` to ``max``; others count as the nearer end."""

    min: float
    max: float

    def __post_init__(self) -> None:
        """Raises ValueError if it has no extent."""
        if self.min >= self.max:
            raise ValueError(f"min {self.min:g} is not below max {self.max:g}")


class Normalization(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The range in which values are ranked: a fixed one, else that of the candidates' values."""

    fixed_range: FixedRange | None = None
    adaptive_range: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if there are two."""
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("fixedRange and adaptiveRange exclude each other; remove one")


class ScorerAlgorithm(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which values are better."""

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class EndpointAttributeScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``endpoint-attribute-scorer``: ``(x - min) / (max - min)`` of one attribute, or 1 less that.

    An endpoint without a value scores 0; if all values are equal, those that have one score 1. Attributes are those of
    ``endpoint-attribute-filter``. With ``source: metadata`` no endpoint has a value: a request's metadata is not read.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"producer": ONE_SOURCE})

    algorithm: ScorerAlgorithm
    attribute_key: str = ""
    source: Literal["", "endpoint", "metadata"] = ""
    metadata_namespace: str = ""
    metadata_field: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError if nothing is named."""
        if not self.attribute_key and self.source != "metadata":
            raise ValueError("attributeKey is missing; write the name of an attribute")

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the best value."""
        values = view.table.attributes.column("" if self.source == "metadata" else self.attribute_key, candidates.size)
        known = candidates & ~np.isnan(values)
        scores = np.zeros(candidates.size)
        if not known.any():
            return scores
        fixed = self.algorithm.normalization.fixed_range
        if fixed is None:
            least, most = float(values[known].min()), float(values[known].max())
        else:
            least, most = fixed.min, fixed.max
        if most <= least:
            scores[known] = 1.0
            return scores
        share = ((values[known] - least) / (most - least)).clip(0.0, 1.0)
        scores[known] = 1 - share if self.algorithm.type == "linear_lower_is_better" else share
        return scores
