# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded at run time: what vLLM answers, and whose weights are kept."""

from __future__ import annotations

import pytest

from bench.engine.lora_adapters import AdapterError, AdapterLimits, Adapters


def loaded(*names: str, **limits: object) -> Adapters:
    adapters = Adapters((), AdapterLimits(**{"max_loras": 2, "max_cpu_loras": 2, **limits}))  # type: ignore[arg-type]
    for name in names:
        adapters.load(name, f"/adapters/{name}")
    return adapters


@pytest.mark.parametrize(
    ("name", "path", "status", "said"),
    [
        ("", "/a", 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("a", "/a", 400, "The lora adapter 'a' has already been loaded."),
        ("b", "/adapters/missing", 404, "Loading lora b failed: No adapter found for /adapters/missing"),
        ("b", "/adapters/rank-64", 500, "LoRA rank 64 is greater than max_lora_rank 16."),
    ],
)
def test_loads_are_refused_in_vllms_words(name: str, path: str, status: int, said: str) -> None:
    with pytest.raises(AdapterError) as caught:
        loaded("a").check_load(name, path)
    assert caught.value.status == status
    assert said in str(caught.value)


def test_names_have_no_bound_and_forgotten_weights_are_read_again() -> None:
    adapters = loaded("a", "b", "c", load_s=0.5)
    assert all(name in adapters for name in "abc")
    # c took the place of a, which takes that of b
    assert [adapters.reload_s(name) for name in "cacb"] == [0.0, 0.5, 0.0, 0.5]


def test_an_engine_that_forgets_nothing_refuses_one_too_many() -> None:
    adapters = loaded("a", "b", overflow="refuse")
    with pytest.raises(AdapterError, match="maximum number of adapters is loaded"):
        adapters.check_load("c", "/c")
    adapters.unload("a")
    assert adapters.check_load("c", "/c") == 0.5
    with pytest.raises(AdapterError, match="'a' cannot be found"):
        adapters.unload("a")
