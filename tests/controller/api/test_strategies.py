# SPDX-License-Identifier: Apache-2.0
"""Strategies by name: ours, and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from controller.api import strategies
from controller.api.autoscaling_policy import STRATEGIES, AutoscalingPolicySpec, Strategy
from controller.api.strategies import StrategyType, installed_strategies
from controller.autoscaler.decision.decide import make_strategies

if TYPE_CHECKING:
    from collections.abc import Sequence

THEIRS: Final = StrategyType(summary="a test", make=lambda _, __: None)
NO_STRATEGY: Final = 1


def entry(name: str, what: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{what}", strategies.ENTRY_POINTS)


def test_other_packages_bring_strategies_but_take_no_name_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def listed(*, group: str) -> Sequence[EntryPoint]:
        assert group == "attache.strategies"
        return [
            entry("Theirs", "THEIRS"),
            entry("Work", "THEIRS"),
            entry("Broken", "gone"),
            entry("Odd", "NO_STRATEGY"),
        ]

    monkeypatch.setattr(strategies, "entry_points", listed)
    found = installed_strategies()
    assert found["Theirs"] is THEIRS
    assert found["Work"] is STRATEGIES["Work"]
    assert {"Broken", "Odd"}.isdisjoint(found)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["Broken", "Odd"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_is_made_from_a_policy_that_names_it_alone(name: str) -> None:
    (made,) = make_strategies(AutoscalingPolicySpec(strategies=(Strategy(name=name),)))
    assert made.name == name


def test_a_strategy_has_its_own_parameters_or_their_defaults() -> None:
    one = msgspec.convert({"name": "SpareCapacity", "spareCapacity": {"queueSpareTrigger": 5.0}}, Strategy)
    assert one.parameters.queue_spare_trigger == 5.0
    assert Strategy(name="SpareCapacity").parameters.queue_spare_trigger == 3.0
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'Nobody'"):
        msgspec.convert({"name": "Nobody"}, Strategy)
