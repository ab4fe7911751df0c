# SPDX-License-Identifier: Apache-2.0
"""Writes the agent's metrics page: the engine's metrics under one set of names, and the agent's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.runtime.dialects import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from controller.agents.runtime.counters import Counters
    from controller.agents.runtime.dialects import Family
    from controller.agents.runtime.engine_page import EnginePage, Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class AgentState(msgspec.Struct, frozen=True):
    """``drain_s``: how long the drain has lasted, or did; None without one."""

    dialect: str
    is_ready: bool
    is_alive: bool
    has_answered: bool
    drain_s: float | None
    file_is_good: bool
    coming: int
    limit: int


def write_page(page: EnginePage | None, state: AgentState, counters: Counters) -> str:
    """Prometheus' text format. Without the engine's page its metrics are missing, and ``..._metrics_up`` is 0."""
    lines: list[str] = []
    if page is not None:
        for family in FAMILIES:
            lines += _engine_lines(family, page)
    lines += _own_lines(state, counters, has_page=page is not None)
    return "\n".join(lines) + "\n"


def _engine_lines(family: Family, page: EnginePage) -> Iterator[str]:
    name = f"attache_engine_{family.name}"
    values, histograms = page.values.get(family.name), page.histograms.get(family.name)
    if values:
        yield from _head(name, family.help, "counter" if family.kind == "counter" else "gauge")
        for model, value in values.items():
            yield f"{name}{_labels(model=model)} {_number(value)}"
    if histograms:
        yield from _head(name, family.help, "histogram" if _has_buckets(histograms) else "summary")
        for model, one in histograms.items():
            for bound, count in one.buckets:
                yield f"{name}_bucket{_labels(model=model, le=bound)} {_number(count)}"
            yield f"{name}_sum{_labels(model=model)} {_number(one.total)}"
            yield f"{name}_count{_labels(model=model)} {_number(one.count)}"


def _has_buckets(histograms: Mapping[str, Histogram]) -> bool:
    return all(one.buckets for one in histograms.values())


def _own_lines(state: AgentState, counters: Counters, *, has_page: bool) -> Iterator[str]:
    gauges = (
        ("ready", "Whether the engine should get requests.", state.is_ready),
        ("alive", "Whether the engine need not be started again.", state.is_alive),
        ("has_answered", "Whether the model has answered since the engine started.", state.has_answered),
        ("metrics_up", "Whether the engine's metrics could be read.", has_page),
        ("draining", "Whether the engine is being drained.", state.drain_s is not None),
        ("drain_seconds", "How long the drain has lasted.", state.drain_s or 0.0),
        ("warm_up_seconds", "How long the last warm-up took.", counters.warm_up_s),
        ("adapters_loaded", "Adapters, or models of the repository, in the engine.", counters.adapters),
        ("adapters_coming", "Adapters that are being downloaded or loaded.", state.coming),
        ("adapters_limit", "Adapters that fit; 0 if not known.", state.limit),
        ("adapters_file_good", "Whether the file of adapters could be read.", state.file_is_good),
    )
    counts = (
        ("engine_starts_total", "Starts of the engine that ended with an answer.", counters.starts),
        ("warm_up_failures_total", "Requests of warm-ups that failed.", counters.warm_up_failures),
        ("adapter_load_seconds_total", "Time spent on loading adapters, downloads included.", counters.load_s),
    )
    labelled = (
        ("probes_total", "Questions to the engine by answer.", "answer", counters.probes),
        ("adapter_loads_total", "Loads of adapters by result.", "result", counters.loads),
        ("adapter_unloads_total", "Unloads of adapters by reason.", "reason", counters.unloads),
    )
    yield from _head("attache_agent_info", "The agent.", "gauge")
    yield f"attache_agent_info{_labels(dialect=state.dialect)} 1"
    for kind, group in (("gauge", gauges), ("counter", counts)):
        for name, text, value in group:
            yield from _head(f"attache_agent_{name}", text, kind)
            yield f"attache_agent_{name} {_number(value)}"
    for name, text, label, values in labelled:
        yield from _head(f"attache_agent_{name}", text, "counter")
        for which, count in values.items():
            yield f"attache_agent_{name}{_labels(**{label: which})} {count}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _labels(**labels: str) -> str:
    """Labels whose value is empty are left out."""
    written = [f'{"model_name" if name == "model" else name}="{value}"' for name, value in labels.items() if value]
    return "{" + ",".join(written) + "}" if written else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
