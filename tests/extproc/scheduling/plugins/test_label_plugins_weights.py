# SPDX-License-Identifier: Apache-2.0
"""Weights of a label's values, by the attribute that a producer makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.endpoints.table import EndpointConfig
from extproc.scheduling.plugins.label_plugins import (
    AttributeWeightParameters,
    LabelProducer,
    LabelWeightScorer,
    TopologyExtractor,
)
from extproc.scheduling.plugins.multicluster import MulticlusterTopologyScorer
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

GPUS = ["H100", "A100", "L4", ""]
NOW = {"labels": [{"label": "zone", "attributeKey": "z"}, {"label": "gpu", "attributeKey": "kind"}]}
BEFORE = {"label": "gpu", "attributeKey": "kind", "valueType": "string"}
WEIGHTS = {"attributeKey": "kind", "producer": "labels", "weights": {"H100": 4, "A100": 2, "T4": 1}}


def scores(scorer: object) -> list[float]:
    view = view_of(4)
    labels = [{"gpu": gpu, "zone": gpu[:1]} if gpu else {} for gpu in GPUS]
    view.table.replace_endpoints({f"e{number}:1": EndpointConfig(one) for number, one in enumerate(labels)})
    found: list[float] = scorer.score(view, view.table.is_active)[:4].tolist()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("producer", [NOW, BEFORE])
@pytest.mark.parametrize("name", ["labels", "other"])
def test_values_score_by_their_share_of_the_highest_weight(producer: dict[str, object], name: str) -> None:
    scorer = msgspec.convert(WEIGHTS, AttributeWeightParameters)
    # without a weight, or without the label: the lowest
    assert scores(scorer.with_plugins({name: msgspec.convert(producer, LabelProducer)})) == [1.0, 0.5, 0.25, 0.25]


def test_an_attribute_that_no_producer_has_prefers_nobody() -> None:
    assert len(set(scores(msgspec.convert(WEIGHTS, AttributeWeightParameters).with_plugins({})))) == 1


def test_clusters_score_by_the_weight_of_their_place() -> None:
    scorer = MulticlusterTopologyScorer(field="zone", weights={"H": 0.7, "A": 0.2})
    assert scores(scorer.with_plugins({"e": TopologyExtractor(zone="zone")})) == [0.7, 0.2, 0.0, 0.0]


def test_a_pick_takes_time_by_endpoints_and_not_by_weights() -> None:
    looked_up = []

    class Weights(dict[str, float]):
        def get(self, key: str, default: float = 0.0) -> float:  # type: ignore[override]  # always with a default
            looked_up.append(key)
            return super().get(key, default)

        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all weights are gone through")

        items = values = keys = __iter__  # type: ignore[assignment]  # none of them is to be called

    assert scores(LabelWeightScorer("gpu", Weights(H100=1.0, **{f"v{n}": 0.5 for n in range(1000)}), 0.25))[:2] == [
        1.0,
        0.25,
    ]
    assert len(looked_up) < 200
