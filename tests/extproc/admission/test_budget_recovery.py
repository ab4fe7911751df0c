# SPDX-License-Identifier: Apache-2.0
"""What rows of the usage process leave of budgets."""

from __future__ import annotations

from extproc.admission.budget_recovery import RemainingBudgets, UsageRollupRow, usage_queries
from extproc.admission.budgets import BudgetSet
from extproc.admission.identity import Caller
from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import RequestUsage
from tests.extproc.admission.test_budgets import NOON, budget, compiled


def test_rows_lower_levels_and_never_raise_them() -> None:
    budgets, limits = compiled(budget(max={"tokens": 1000, "requests": 10, "money": "1"})), LocalLimits()
    rows = [
        UsageRollupRow(
            "a",
            user="x",
            route="default/chat",
            requests=5,
            refused=2,
            input_tokens=100,
            output_tokens=50,
            cost_micros={"USD": 7},
        ),
        UsageRollupRow(
            "a", user="y", route="default/chat", requests=1, input_tokens=1, output_tokens=0, cost_micros={"USD": 1}
        ),
        UsageRollupRow("b", route="default/other", requests=9),
    ]
    (query,) = usage_queries(budgets.budget_groups(), NOON, has_keys=False)
    spent = RemainingBudgets(
        query, lambda route: budgets if route == "default/chat" else BudgetSet(), lambda _: None, NOON
    )
    for row in rows:
        spent.add_row(row)
    found, shared = spent.levels()
    assert sorted(level.level for level in found) == [6.0, 849.0, 999_992.0]
    assert not shared
    tokens = next(
        each for each in budgets.charges(Caller("a"), RequestUsage(0.0, 400.0), NOON) if "tokens" in each.resource
    )
    limits.reserve([tokens], 0.0)
    limits.cap_levels(found, 0.0)
    assert limits.level_of(tokens) == 600.0
    limits.reserve([tokens], 0.0)
    limits.cap_levels(found, 0.0)
    assert limits.level_of(tokens) == 200.0
