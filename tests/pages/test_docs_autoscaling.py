# SPDX-License-Identifier: Apache-2.0
"""What the page about autoscaling has of rules and strategies is what the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.decision import Rule
from controller.autoscaler.reconciler.status import LIMITING
from tests.scaling_scenes import engine, report, situation, target

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What makes a step of a decision, and has the rule as its first argument.
MAKERS = {"AppliedRule", "adjusted_to", "floored_at", "capped_at"}


def test_the_strategy_on_the_page_recommends() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (DOCS / "autoscaling.md").read_text(), re.DOTALL)
    module: dict[str, Any] = {}
    exec(source, module)  # noqa: S102 - it is ours
    theirs = module["PER_REQUEST"]
    made = theirs.make(msgspec.convert({"requests": 4}, type(theirs.defaults)), AutoscalingPolicySpec())
    recommended, _ = made.recommend(situation(target([engine("a", report(in_flight=9))])), None)
    assert (recommended.replicas, recommended.reason) == (3, "9 requests in flight")
    unsure, _ = made.recommend(situation(target([engine(name) for name in "abcd"])), None)
    assert unsure.replicas == 4


def rules_in_code() -> Iterator[str]:
    """The first argument of all that makes steps."""
    for file in (ROOT / "controller" / "autoscaler" / "decision").rglob("*.py"):
        if file.name == "decision.py":
            # it hands on what it is given
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _name_of(node.func) in MAKERS:
                rule = node.args[0]
                assert isinstance(rule, ast.Constant), f"{file.name}:{node.lineno}: write the rule's name here"
                yield str(rule.value)


def _name_of(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def test_each_rule_of_a_step_is_one_of_the_list() -> None:
    assert set(rules_in_code()) == set(get_args(Rule))


def test_the_page_says_of_each_rule_when_it_changes_the_answer() -> None:
    (table,) = re.findall(r"\| step \| when \|\n\|---\|---\|\n((?:\|.*\n)+)", (DOCS / "autoscaling.md").read_text())
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(get_args(Rule))


def test_the_page_says_which_rules_the_condition_scaling_limited_names() -> None:
    (row,) = re.findall(r"\| `ScalingLimited` \| (.*): the step", (DOCS / "autoscaling.md").read_text())
    assert set(re.findall(r"`(\w+)`", row)) == LIMITING
