# SPDX-License-Identifier: Apache-2.0
"""What Prometheus, engines' pages and the resource metrics API answer, as numbers or as why there is none; pure."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.models.node_room import quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LONGEST: Final = 200
_SELECTOR: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\s*(\{[^{}]*\})?|\{[^{}]*\}")
# After the name of a metric on a page.
_AFTER_NAME: Final = re.compile(rb"(?:\{[^\n]*\})?[ \t]+([^ \t\n]+)")
# Of a metric, and those whose names begin with its name: engines have a few.
_MOST_LINES: Final = 10_000
_WHICH: Final = "attache_sample"
# Of several series of one page, as of data-parallel ranks, these are shares: the fullest counts. Others add up.
_SHARES: Final = ("_perc", "_percent", "_ratio", "_usage", "_utilization")


class Value(msgspec.Struct, frozen=True):
    """``number``: None if there is none; ``problem`` says why. ``age_s``: of the sample. ``is_partial``: the server
    says that it did not reach all of its data.
    """

    number: float | None = None
    problem: str = ""
    age_s: float = 0.0
    is_partial: bool = False


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str = ""
    result: Any = None


class _Answer(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    data: _Data = _Data()
    error_type: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str]


_ANSWERS: Final = msgspec.json.Decoder(_Answer)


def asked(query: str) -> str:
    """What is sent for a query. Prometheus gives no sample's own time, only that of the evaluation, unless it is asked
    for; of a plain selector it is.
    """
    stripped = query.strip()
    if _SELECTOR.fullmatch(stripped) is None:
        return query
    value = f'label_replace({stripped}, "{_WHICH}", "value", "", "")'
    return f'{value} or label_replace(timestamp({stripped}), "{_WHICH}", "time", "", "")'


def prometheus_value(body: bytes) -> Value:
    """From the answer to an instant query. No series, several, and what is no finite number are problems, never 0."""
    try:
        answer = _ANSWERS.decode(body)
        if answer.status != "success":
            said = f"{answer.error_type}: {answer.error}"[:_LONGEST]
            return Value(problem=f"the query fails: {said}")
        return _of(answer)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return Value(problem="the answer is not that of a Prometheus")


def _of(answer: _Answer) -> Value:
    is_partial = bool(answer.warnings)
    if answer.data.result_type == "scalar":
        at_s, text = msgspec.convert(answer.data.result, tuple[float, str])
        return _finite(text, 0.0, is_partial=is_partial)
    if answer.data.result_type != "vector":
        return Value(problem=f"the query gives a {answer.data.result_type}; it must give one number")
    series = msgspec.convert(answer.data.result, list[_Series])
    values = [one for one in series if one.metric.get(_WHICH) != "time"]
    times = [one for one in series if one.metric.get(_WHICH) == "time"]
    if not values:
        return Value(problem="the query finds nothing")
    if len(values) > 1:
        return Value(problem=f"the query gives {len(values)} series; it must give one, for instance with sum()")
    at_s, text = values[0].value
    age_s = max(0.0, at_s - min(float(one.value[1]) for one in times)) if times else 0.0
    return _finite(text, age_s, is_partial=is_partial)


def _finite(text: str, age_s: float, *, is_partial: bool) -> Value:
    number = float(text)
    if not math.isfinite(number) or not math.isfinite(age_s):
        return Value(problem=f"the query gives {text}")
    return Value(number, age_s=age_s, is_partial=is_partial)


def page_values(page: bytes, names: Iterable[str]) -> dict[str, float]:
    """The metrics of these names on a page in Prometheus' text format; those that are not there, have very many series,
    or are no finite number, are left out.
    """
    found: dict[str, float] = {}
    for name in names:
        numbers = _numbers_of(name.encode(), page)
        if numbers and all(map(math.isfinite, numbers)):
            found[name] = max(numbers) if name.endswith(_SHARES) else sum(numbers)
    return found


def _numbers_of(name: bytes, page: bytes) -> list[float]:
    """Of each series of a metric. Pages are long, and mostly about other metrics: lines are searched for, not read."""
    numbers: list[float] = []
    sought = b"\n" + name
    at = len(name) if page.startswith(name) else _end_of(sought, page, 0)
    for _ in range(_MOST_LINES):
        if at < 0:
            return numbers
        line = _AFTER_NAME.match(page, at)
        if line is not None:
            try:
                numbers.append(float(line[1]))
            except ValueError:
                numbers.append(math.nan)
        at = _end_of(sought, page, at)
    return []


def _end_of(sought: bytes, page: bytes, begin: int) -> int:
    """Where it ends that is found next; -1: nowhere."""
    at = page.find(sought, begin)
    return at + len(sought) if at >= 0 else -1


class PodUsage(msgspec.Struct, frozen=True):
    """What a pod uses: cores and bytes. ``age_s`` is not told: ``at`` is the time of the sample as the API has it."""

    cpu: float
    memory: float
    at: str = ""


def usage_by_pod(items: Iterable[Mapping[str, Any]]) -> dict[str, PodUsage]:
    """From the items of a PodMetricsList, by the pods' names. Pods with containers that have no usage are left out."""
    found: dict[str, PodUsage] = {}
    for item in items:
        containers = item.get("containers") or ()
        usages = [one.get("usage") or {} for one in containers]
        if not usages or any("cpu" not in one or "memory" not in one for one in usages):
            continue
        try:
            found[item["metadata"]["name"]] = PodUsage(
                cpu=sum(quantity(one["cpu"]) for one in usages),
                memory=sum(quantity(one["memory"]) for one in usages),
                at=str(item.get("timestamp", "")),
            )
        except (KeyError, ValueError):
            continue
    return found
