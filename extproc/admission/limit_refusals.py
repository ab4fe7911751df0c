# SPDX-License-Identifier: Apache-2.0
"""What clients are told of rate limits and budgets: refusals, and the headers of answers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from extproc.admission.budgets import BudgetKey
from extproc.api.budgets import EVERY, budget_title
from extproc.api.quantities import money_text
from extproc.refusals import BudgetSpent, LimitsUnavailable, RateLimited
from extproc.wire_names import BUDGET_HEADERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.admission.rate_limits import Charge, ChargedBudget, Grant
    from extproc.refusals import Refusal

BUDGET_REMAINING, BUDGET_WARNING = BUDGET_HEADERS


def limit_refusal(charges: Sequence[Charge], levels: Sequence[float]) -> Refusal:
    """The error for charges that buckets at ``levels`` cannot grant; it names the one with the longest wait."""
    shortfalls = [charge.needed_level - level for charge, level in zip(charges, levels, strict=True)]
    waits = [
        _wait_s(charge, shortfall) if shortfall > 0 else 0.0
        for charge, shortfall in zip(charges, shortfalls, strict=True)
    ]
    worst = max(range(len(charges)), key=lambda index: waits[index])
    charge, headers = charges[worst], _headers(charges, levels)
    if charge.budget is not None:
        return _spent(charge, charge.budget, levels[worst], headers)
    resource, capacity = charge.resource.replace("_", " "), math.floor(charge.limit.capacity)
    kind = "requests" if charge.resource == "requests" else "tokens"
    if charge.needed_level > charge.limit.capacity:
        message = (
            f"The request needs {math.ceil(charge.amount)} {resource}, and the limit of {charge.whose} grants no more"
            f" than {capacity} at once; shorten the prompt or lower max_tokens."
        )
        return RateLimited(message, kind=kind, headers=headers, retry_after_s=None)
    wait_s = waits[worst]
    message = (
        f"Rate limit reached for {resource} per {charge.unit} of {charge.whose}: the request needs"
        f" {math.ceil(charge.amount)}, {max(0, math.floor(levels[worst]))} of {capacity} are left. Please try again in"
        f" {_duration(wait_s)}."
    )
    refused = RateLimited(message, kind=kind, headers=headers, retry_after_s=max(1, math.ceil(wait_s)))
    # behind the last slash is whose bucket it is: nobody's where all callers share it
    refused.is_of_caller = not charge.key.endswith("/")
    return refused


def _wait_s(charge: Charge, shortfall: float) -> float:
    return shortfall / charge.limit.rate if charge.limit.rate else charge.ends_in_s


def _spent(charge: Charge, budget: ChargedBudget, level: float, headers: Mapping[str, str]) -> BudgetSpent:
    most, left = amount_text(charge, charge.limit.capacity), amount_text(charge, max(0.0, level))
    whose = "of all callers" if budget.holder == "gateway" else f"of this {budget.holder}"
    shown = budget.title
    begin = f"The {EVERY[budget.window]} budget '{shown}' {whose}" if shown == budget.name else f"The {shown}"
    if level <= 0:
        message = f"{begin} ({most}) is used up."
    else:
        need = amount_text(charge, charge.amount)
        needs = f"the request needs up to {need}, {left} of {most} are left"
        message = f"{begin} is not enough: {needs}; shorten the prompt or lower max_tokens."
    again = max(1, math.ceil(charge.ends_in_s))
    end = datetime.fromtimestamp(charge.limit.ends_at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    message = f"{message} It resets in {_duration(again)}, at {end}."
    return BudgetSpent(message, budget=budget.key, headers=headers, retry_after_s=again)


def amount_text(charge: Charge, amount: float) -> str:
    """An amount of a budget with its unit."""
    unit = "" if charge.budget is None else charge.budget.unit
    return f"{money_text(int(amount))} {unit}" if charge.resource == "cost_micros" else f"{math.floor(amount)} {unit}"


def budget_headers(charges: Sequence[Charge], levels: Sequence[float]) -> dict[str, str]:
    """What is left of each budget, in the form of the IETF's RateLimit header: ``"team";r=12.34;t=86400;unit="USD"``,
    and the warnings of those that are used beyond their soft share.
    """
    left, warnings = [], []
    for charge, level in zip(charges, levels, strict=True):
        budget = charge.budget
        if budget is None:
            continue
        rest = int(level) if level > 0.0 else 0
        shown = money_text(rest) if charge.resource == "cost_micros" else rest
        left.append(f'"{budget.title}";r={shown};t={math.ceil(charge.ends_in_s) or 1};unit="{budget.unit}"')
        if level <= budget.soft:
            used = 1.0 - max(0.0, level) / charge.limit.capacity
            warnings.append(f'"{budget.title}";used={used:.2f};unit="{budget.unit}"')
    headers = {}
    if left:
        headers[BUDGET_REMAINING] = ", ".join(left)
    if warnings:
        headers[BUDGET_WARNING] = ", ".join(warnings)
    return headers


def soft_budget_log_message(charge: Charge, level: float) -> str:
    """For the operator: a caller has passed the soft share of its budget."""
    budget, key = charge.budget, BudgetKey.parse(charge.key)
    if budget is None or key is None:
        return ""
    used, most = charge.limit.capacity - level, charge.limit.capacity
    whose = f"the {budget.holder} {key.caller_text}" if key.caller_text else "all callers"
    shown = budget_title(budget.name, "the key itself")
    begin = f"budget {budget.key}" if shown == budget.name else shown
    return (
        f"{begin}: {whose} has reserved or used {used / most:.0%} of {amount_text(charge, most)} for this"
        f" {budget.window}"
    )


def limits_unavailable_refusal() -> LimitsUnavailable:
    """The error while Redis does not answer, for limits with ``withoutRedis: Refuse``."""
    return LimitsUnavailable("Rate limits cannot be checked at the moment; try again soon.", retry_after_s=1)


def rate_limit_headers(charges: Sequence[Charge], levels: Sequence[float]) -> dict[str, str]:
    """OpenAI's ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``, each of the emptiest bucket."""
    headers: dict[str, str] = {}
    for kind in ("requests", "tokens"):
        held = [
            (level / charge.limit.capacity, level, charge.limit)
            for charge, level in zip(charges, levels, strict=True)
            if charge.budget is None and (charge.resource == "requests") == (kind == "requests")
        ]
        if held:
            _, level, limit = min(held, key=lambda one: one[0])
            headers[f"x-ratelimit-limit-{kind}"] = str(math.floor(limit.capacity))
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{kind}"] = _duration((limit.capacity - level) / limit.rate)
    return headers


def headers_of_grants(grants: Sequence[Grant]) -> dict[str, str]:
    """The same headers for granted reservations."""
    if len(grants) == 1:
        return _headers(grants[0].charges, grants[0].levels)
    charges = [charge for grant in grants for charge in grant.charges]
    return _headers(charges, [level for grant in grants for level in grant.levels])


def _headers(charges: Sequence[Charge], levels: Sequence[float]) -> dict[str, str]:
    headers = budget_headers(charges, levels)
    if None in [charge.budget for charge in charges]:
        headers.update(rate_limit_headers(charges, levels))
    return headers


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1s, 6m0s, 1h2m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
