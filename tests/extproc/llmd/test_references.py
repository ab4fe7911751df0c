# SPDX-License-Identifier: Apache-2.0
"""Files whose plugins refer to each other, in chains and in circles of any length."""

from __future__ import annotations

import json

import pytest

from extproc.api.errors import ConfigInvalid
from extproc.llmd import references as picker_references
from extproc.llmd.profiles import picker_from_text
from extproc.llmd.registry import BUILT_IN

HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def text_of(references: dict[str, str]) -> str:
    """Decision trees by name, each with the one that it refers to, and a filter called ``end``."""
    trees = [
        {"type": "decision-tree-filter", "name": name, "parameters": {"current": {"pluginRef": target}}}
        for name, target in references.items()
    ]
    return json.dumps({**HEAD, "plugins": [*trees, {"type": "session-affinity-filter", "name": "end"}]})


def refused(references: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigInvalid) as error:
        picker_from_text("epp.json", text_of(references), BUILT_IN)
    return str(error.value).splitlines()


def test_the_names_of_a_circle_are_told_in_order_and_what_leads_to_it_is_not() -> None:
    found = refused({"lead": "a", "a": "b", "b": "c", "c": "a", "fine": "end"})
    assert [line.partition("itself: ")[2] for line in found] == [
        "a -> b -> c -> a; break the circle",
        "b -> c -> a -> b; break the circle",
        "c -> a -> b -> c; break the circle",
    ]


def test_a_circle_of_thousands_is_told_in_a_few_lines() -> None:
    found = refused({f"t{n}": f"t{(n + 1) % 3000}" for n in range(3000)})
    assert len(found) == 10
    assert all(len(line) < 200 for line in found)


def test_long_chains_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker_references, "_circle", lambda *_: pytest.fail("a chain with an end is no circle"))
    chain = {f"t{n}": f"t{n + 1}" for n in range(2000)} | {"t1999": "end"}
    picker_from_text("epp.json", text_of(chain), BUILT_IN)
