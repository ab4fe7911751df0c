# SPDX-License-Identifier: Apache-2.0
"""The invariants notice mistakes: each planted one breaks a history that holds without it."""

from __future__ import annotations

import pytest

from tests.controller.models.model_infer.chaos.mutants import MUTANTS, Mutant
from tests.controller.models.model_infer.chaos.oracle import Broken
from tests.controller.models.model_infer.chaos.stories import ends_well


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_planted_mistake_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_well(mutant.scene(), mutant.happenings)
    mutant.plant(monkeypatch)
    with pytest.raises(Broken) as met:
        ends_well(mutant.scene(), mutant.happenings)
    assert met.value.name in mutant.caught_by
