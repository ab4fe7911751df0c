# SPDX-License-Identifier: Apache-2.0
"""The invariants notice mistakes: each planted one breaks a history that holds without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.controller.models.model_infer.chaos.mutants import MUTANTS, Mutant
from tests.controller.models.model_infer.chaos.oracle import Broken
from tests.controller.models.model_infer.chaos.stories import ends_well

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.controller.models.model_infer.chaos.events import Event
    from tests.controller.models.model_infer.chaos.history import Start


_HELD: list[tuple[Start, Sequence[Event]]] = []


def holds_without(start: Start, happenings: Sequence[Event]) -> None:
    """Several mistakes are planted in the same history: it is played once without any."""
    if (start, happenings) not in _HELD:
        ends_well(start, happenings)
        _HELD.append((start, happenings))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_planted_mistake_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    holds_without(mutant.start(), mutant.happenings)
    mutant.plant(monkeypatch)
    with pytest.raises(Broken) as met:
        ends_well(mutant.start(), mutant.happenings)
    assert met.value.name in mutant.caught_by
