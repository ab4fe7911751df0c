# SPDX-License-Identifier: Apache-2.0
"""Whether the engines of a ModelServer serve the model that it names, by their own lists of models.

Some engines take any name, so a list alone refuses nothing. Once an engine without the model has answered 404, requests
of that API are refused with what the engines list instead. They are sent again once an engine without the model has
served it, has restarted or lists it, once no list is recent, or with another ``model`` in the configuration. Another
API is tried for itself: a 404 may also mean that the engine lacks the API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.api.config_errors import replace_unprintable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.scheduling.pool import Pool
    from extproc.wire_names import Api

_NOT_FOUND: Final = 404
# A list is read every 5 s, or in place of every fourth report: it may be missed twice.
_LIST_INTERVAL_S: Final = 5.0
_REPORTS_PER_LIST: Final = 4
_LISTS: Final = 3
# In one message.
_MOST_NAMED: Final = 3
_LONGEST_NAME: Final = 200


def quoted_names(names: Iterable[str]) -> str:
    """For people: some of the names of models that an engine lists, which may be any text."""
    listed = sorted(names)
    shown = [replace_unprintable(one[:_LONGEST_NAME]) for one in listed]
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    return ", ".join(f"'{one}'" for one in shown[:_MOST_NAMED]) + more if shown else "no model"


def update_missing_model(pool: Pool, row: int) -> bool:
    """The engine of ``row`` has listed its models. Returns whether it is the first that lacks the pool's model, or the
    last that lacked it.
    """
    served, health = pool.table.loras[row].served, pool.table.healths[row]
    is_missing = pool.is_asked_by_model and served is not None and pool.spec.model not in served
    lacks = pool.spec.model if is_missing else ""
    if lacks == health.lacks_model:
        return False
    others = {pool.table.healths[one].lacks_model for one in pool.table.active_rows if one != row}
    before, health.lacks_model = health.lacks_model, lacks
    pool.may_lack_model = bool(lacks) or any(others)
    return (lacks or before) not in others


def model_problem(pool: Pool) -> str:
    """What is wrong with the pool's model, and what to write, if all engines that list their models lack it."""
    table, model = pool.table, pool.spec.model
    if not pool.may_lack_model:
        return ""
    listing = [row for row in table.active_rows if table.loras[row].served is not None]
    if not listing or any(table.healths[row].lacks_model != model for row in listing):
        return ""
    names = quoted_names({name for row in listing for name in table.loras[row].base})
    return f"its engines list {names} and not '{model}'; write one of the engines' names as 'model'"


def model_problems(pools: Iterable[Pool]) -> dict[str, str]:
    """By pool, what is wrong with its model; pools with no problem are left out."""
    return {pool.name: problem for pool in pools if (problem := model_problem(pool))}


def on_model_outcome(pool: Pool, served: str, status: int, api: Api | None) -> None:
    """A request of ``api`` for the pool's model was answered with ``status`` by the engine at ``served``."""
    row = pool.table.row_of(served)
    if row is None or not pool.table.healths[row].lacks_model:
        return
    if status == _NOT_FOUND:
        pool.table.healths[row].serves_unlisted = False
        pool.apis_without_model.add(api)
    elif 200 <= status < 300:
        pool.table.healths[row].serves_unlisted = True
        pool.apis_without_model.clear()


def why_model_is_refused(pool: Pool, api: Api | None, now: float) -> str:
    """Why requests of ``api`` for the pool's model are refused now; empty if they are not."""
    if api not in pool.apis_without_model:
        return ""
    healths = [pool.table.healths[row] for row in pool.table.active_rows]
    if any(one.lacks_model and one.serves_unlisted for one in healths):
        return ""
    interval_s = max(_LIST_INTERVAL_S, _REPORTS_PER_LIST * pool.report_interval_s)
    if not any(one.lacks_model and now - one.listed_at_s < _LISTS * interval_s for one in healths):
        return ""
    problem = model_problem(pool)
    return problem and f"The ModelServer {pool.name} is configured with a wrong model: {problem}."
