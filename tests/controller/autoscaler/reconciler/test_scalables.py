# SPDX-License-Identifier: Apache-2.0
"""What is read of objects that can be scaled, whatever their owners wrote into them."""

from __future__ import annotations

import pytest

from controller.autoscaler.reconciler.scalables import SCALED_TO, find_scalable_kind, parse_scalable
from controller.kube.api_resources import DEPLOYMENTS


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", {3}),
        ("3 from 1", {3, 1}),
        ("", set()),
        ("9" * 5000, set()),
        ("1 from " * 1000, set()),
        ("²", set()),
        ("-1", set()),
    ],
)
def test_what_nobody_of_us_wrote_as_replicas_is_none(text: str, numbers: set[int]) -> None:
    kind = find_scalable_kind(DEPLOYMENTS.group, DEPLOYMENTS.kind)
    assert kind is not None
    metadata = {"name": "llama", "namespace": "default", "annotations": {SCALED_TO: text}}
    assert parse_scalable(kind, {"metadata": metadata}).scaled_to == numbers
