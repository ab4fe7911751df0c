# SPDX-License-Identifier: Apache-2.0
"""The soak's changes: always valid, never of one kind alone, and the broken files are broken."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from bench.soak.model_changes import (
    BROKEN,
    CHANGES,
    apply_change,
    engine_hosts,
    initial_models,
    model_file_content,
    next_change,
    spare_model_count,
)
from bench.soak.soak_loops import probe_targets
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import ConfigDirectory

if TYPE_CHECKING:
    from pathlib import Path

PORTS = (7001, 7002, 7003)
SIZE = 12


def test_whatever_changes_the_directory_is_valid_and_of_its_size(tmp_path: Path) -> None:
    rng, fleet, kinds = random.Random(1), initial_models(SIZE, len(PORTS)), set()
    for model in fleet.values():
        (tmp_path / model.file).write_text(model_file_content(model, PORTS))
    directory = ConfigDirectory(tmp_path)
    for _ in range(150):
        change = next_change(fleet, rng, size=SIZE, engines=len(PORTS))
        kinds.add(change.name)
        fleet = apply_change(fleet, change)
        if change.after is not None:
            (tmp_path / change.after.file).write_text(model_file_content(change.after, PORTS))
        elif change.before is not None:
            (tmp_path / change.before.file).unlink()
        assert len(directory.read().routes) == len(fleet)
        assert SIZE - 1 <= len(fleet) <= SIZE + spare_model_count(SIZE)
    assert kinds == set(CHANGES)


def test_every_change_changes_its_file() -> None:
    rng, fleet = random.Random(2), initial_models(SIZE, len(PORTS))
    for _ in range(150):
        change = next_change(fleet, rng, size=SIZE, engines=len(PORTS))
        before, after = change.before, change.after
        assert (
            before is None
            or after is None
            or model_file_content(before, PORTS) != model_file_content(after, PORTS)
            or (
                # of a model with one ModelServer the weights say nothing
                change.name == "weight"
            )
        )
        fleet = apply_change(fleet, change)


def test_no_two_model_servers_share_an_address() -> None:
    assert len(set(engine_hosts(1100))) == len(engine_hosts(1100))


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_file_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "broken.yaml").write_text(BROKEN[what])

    with pytest.raises(ConfigInvalid):
        ConfigDirectory(tmp_path).read()


def test_until_a_change_is_used_the_engine_may_get_the_name_of_before() -> None:
    model = initial_models(1, 1)[0]
    change = next(
        one
        for seed in range(100)
        if (one := next_change({0: model}, random.Random(seed), size=1, engines=1)).name == "served name"
    )
    assert change.after is not None

    assert probe_targets(change.after)["m0.0"].echoes == {"model-0000-a.1", "model-0000-b.1"}
    assert probe_targets(change.after, model)["m0.0"].echoes > probe_targets(change.after)["m0.0"].echoes
