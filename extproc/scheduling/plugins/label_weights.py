# SPDX-License-Identifier: Apache-2.0
"""Scores by the value of a label, such as the kind of GPU: llm-d's label producer and weight scorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from extproc.scheduling.labels import label_values

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class LabelAttribute(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A label of endpoints that is called ``attributeKey``."""

    label: NonEmpty
    attribute_key: NonEmpty


class LabelProducer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``label-producer``: labels of endpoints that are attributes, for ``endpoint-attribute-weight-scorer``.

    ``label`` and ``attributeKey`` are one of them, as releases before had it. ``valueType`` has no effect: values are
    compared as text.
    """

    labels: tuple[LabelAttribute, ...] = ()
    label: str = ""
    attribute_key: str = ""
    value_type: Literal["", "string", "number", "numeric"] = ""

    def label_of(self, attribute: str) -> str:
        """The label that is called ``attribute``; empty: none."""
        if attribute == self.attribute_key:
            return self.label
        return next((one.label for one in self.labels if one.attribute_key == attribute), "")


class AttributeWeight(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``endpoint-attribute-weight-scorer``: ``weight / highest weight`` of an attribute's value.

    The attribute is one of the file's ``label-producer``. A value without a weight, and an endpoint without the
    attribute, have the lowest one.
    """

    attribute_key: NonEmpty
    weights: Annotated[dict[str, Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]
    producer: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> LabelWeights:
        """With the label that a producer calls so."""
        named = others.get(self.producer)
        producers = [named] if isinstance(named, LabelProducer) else others.values()
        found = (one.label_of(self.attribute_key) for one in producers if isinstance(one, LabelProducer))
        highest = max(self.weights.values())
        scores = {value: weight / highest for value, weight in self.weights.items()}
        return LabelWeights(next(filter(None, found), ""), scores, min(scores.values()))


class LabelWeights(msgspec.Struct, frozen=True):
    """The scorer: each value of the label with its score, and ``other`` for all other endpoints."""

    label: str
    scores: Mapping[str, float]
    other: float = 0.0

    def score(self, view: View, candidates: Bools) -> Floats:
        """The score of each endpoint's value."""
        if not self.label:
            return np.full(candidates.size, self.other)
        # by endpoints, not by weights: a file may list many values that none has
        return np.array([self.scores.get(value, self.other) for value in label_values(view.table, self.label)])
