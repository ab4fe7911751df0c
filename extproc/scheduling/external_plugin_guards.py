# SPDX-License-Identifier: Apache-2.0
"""Plugins of other packages, guarded: what they raise or return wrongly is PluginFailed, and they can change no input.

Our own plugins run unguarded: a mistake of ours is refused as InternalError, and tests see it.
"""

from __future__ import annotations

import math
import operator
import random
import sys
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import msgspec
import numpy as np

from extproc.endpoints.learned_speeds import PromptCost
from extproc.endpoints.table import EndpointConfig, EndpointTable
from extproc.refusals import Refusal
from extproc.scheduling.framework import NeedsPlugins, SessionPlugin
from extproc.scheduling.picker import Pick, PluginFailed, RequestDemandByRow, RequestFacts, View
from extproc.scheduling.sessions import SessionBindings, SessionNote, TenantSessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.framework import ConfiguredPicker, PrefillDecider, Profile, Selector

_METHODS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "filter": ("keep",),
        "scorer": ("score",),
        "filter and scorer": ("keep", "score"),
        "picker": ("order", "max_num_of_endpoints"),
        "decider": ("wants_prefill",),
        "profile handler": ("needs", "run"),
        "admitter": ("admit",),
        "screener": ("keep", "paired"),
        "reporter": ("reporter",),
    }
)
_SHOWN: Final = 100
_USAGE: Final = {
    "prompt_tokens": 100,
    "completion_tokens": 10,
    "total_tokens": 110,
    "prompt_tokens_details": {"cached_tokens": 50},
    "prompt_token_details": {"cached_tokens": 50},
}


class GuardedPlugin:
    """A plugin in all the roles that one can have; only the methods of its own kind are called."""

    def __init__(self, name: str, plugin: Any) -> None:  # noqa: ANN401 - plugins have no type in common
        self.name = name
        self._plugin = plugin

    def keep(self, view: View, candidates: Bools) -> Bools:
        """A filter, or a screener."""
        given = self.call("keep", _read_only_view(view), _read_only(candidates))
        return self._column("keep", given, candidates, "b", "True or False")

    def score(self, view: View, candidates: Bools) -> Floats:
        """A scorer. Rows outside ``candidates`` may have any number, and none."""
        given = self.call("score", _read_only_view(view), _read_only(candidates))
        values = self._column("score", given, candidates, "buif", "a number")
        for row in np.flatnonzero(candidates & ~np.isfinite(values)):
            self.raise_wrong_return(
                "score", f"{values[row]} for {view.table.addresses[row]}", "a finite number, from 0 to 1"
            )
        return values

    @property
    def max_num_of_endpoints(self) -> int | None:
        """Of a picker."""
        most = self.call("max_num_of_endpoints")
        if most is not None and (not isinstance(most, int) or most < 1):
            self.raise_wrong_return("max_num_of_endpoints", _short(most), "a number from 1 up, or None")
        return most

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """A picker (the framework's Selector)."""
        given = self.call("order", _read_only(scores), rng, count)
        most = scores.size if count is None else min(count, scores.size)
        rows = self._rows("order", given)
        is_legal = all(0 <= one < scores.size for one in rows) and len(set(rows)) == len(rows)
        if not rows or len(rows) > most or not is_legal:
            self.raise_wrong_return("order", _short(given), f"1 to {most} different positions below {scores.size}")
        return rows

    def wants_prefill(self, view: View, decode_row: int) -> bool:
        """A decider."""
        given = self.call("wants_prefill", _read_only_view(view), decode_row)
        if not isinstance(given, bool | np.bool_):
            self.raise_wrong_return("wants_prefill", _short(given), "True or False")
        return bool(given)

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """A profile handler, while the file is read."""
        given = self.call("needs", MappingProxyType(dict(profiles)))
        return None if given is None else str(given)

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """A profile handler."""
        pick = self.call("run", _read_only_view(view), profiles, deciders, rng)
        if not isinstance(pick, Pick):
            self.raise_wrong_return("run", _short(pick), "a Pick, as profiles' pick does")
        rows = self._rows("run", pick.rows)
        prefill = self._rows("run", () if pick.prefill_row is None else (pick.prefill_row,))
        candidates = view.candidates()
        if not rows or not all(0 <= row < candidates.size and candidates[row] for row in (*rows, *prefill)):
            some = _short(np.flatnonzero(candidates).tolist())
            self.raise_wrong_return("run", f"the rows {_short([*rows, *prefill])}", f"some of {some}")
        cost_s: object = pick.cost_s
        if not isinstance(cost_s, int | float) or not 0 <= cost_s < math.inf:
            self.raise_wrong_return("run", f"a cost_s of {_short(cost_s)}", "a finite number of seconds, 0 or more")
        return msgspec.structs.replace(pick, rows=rows[: view.choices])

    def admit(self, view: View, rng: random.Random) -> None:
        """An admitter; raises Shed."""
        self.call("admit", _read_only_view(view), rng)

    def paired(self, handler: Any) -> Any:  # noqa: ANN401 - as plugins
        """A screener, while the file is read."""
        return self.call("paired", handler)

    @property
    def prefill_name(self) -> str:
        """Of a profile handler: the profile that picks prefill endpoints; empty if it has none."""
        return str(getattr(self._plugin, "prefill_name", ""))

    def reporter(self) -> GuardedReporter:
        """Of a reporter, while the file is read."""
        try:
            reporter = self._plugin.reporter()
            return GuardedReporter(GuardedPlugin(self.name, reporter), str(reporter.namespace), str(reporter.name))
        except (Exception, SystemExit) as error:
            raise plugin_failure(self.name, self._plugin, error) from error

    def session_plugin(self) -> GuardedSessionPlugin | None:
        """The same plugin as a SessionPlugin, if it is one; while the file is read."""
        try:
            is_keeper = isinstance(self._plugin, SessionPlugin)
            return GuardedSessionPlugin(self, str(self._plugin.profile_name)) if is_keeper else None
        except (Exception, SystemExit) as error:
            raise plugin_failure(self.name, self._plugin, error) from error

    def call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - that is what is to be seen
        """What the method returns, or the attribute of this name; raises PluginFailed, and refusals as they are."""
        try:
            found = getattr(self._plugin, method)
            return found(*arguments) if arguments else found
        except (Refusal, PluginFailed):
            # a refusal is an answer; a profile that a handler runs has plugins of its own
            raise
        except (Exception, SystemExit) as error:
            raise plugin_failure(self.name, self._plugin, error) from error

    def _column(self, method: str, given: object, candidates: Bools, kinds: str, wanted: str) -> NDArray[Any]:
        try:
            column = np.asarray(given)
        except (Exception, SystemExit) as error:
            raise plugin_failure(self.name, self._plugin, error) from error
        if column.shape != candidates.shape or column.dtype.kind not in kinds:
            self.raise_wrong_return(method, _short(given), f"{wanted} for each of the {candidates.size} rows")
        return column if kinds == "b" else column.astype(np.float64)

    def _rows(self, method: str, given: Any) -> list[int]:  # noqa: ANN401 - that is what is to be seen
        try:
            return [operator.index(one) for one in given]
        except (Exception, SystemExit):  # noqa: BLE001 - what it returned may do anything
            self.raise_wrong_return(method, _short(given), "whole numbers")

    def raise_wrong_return(self, method: str, returned: str, wanted: str) -> NoReturn:
        """The method has returned something else than ``wanted``: raises PluginFailed."""
        code = getattr(getattr(type(self._plugin), method, None), "__code__", None)
        where = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        cause = TypeError(f"'{method}' returned {returned}; return {wanted}")
        raise PluginFailed(self.name, cause, where)


def guard_plugin(name: str, kind: str, plugin: Any, others: Mapping[str, Any]) -> GuardedPlugin:  # noqa: ANN401 - see GuardedPlugin
    """A plugin behind its guard, made from its parameters; raises PluginFailed if it cannot do what its kind must.

    ``others``: all plugins of the file by their names, as their parameters.
    """
    try:
        whole = plugin.with_plugins(others) if isinstance(plugin, NeedsPlugins) else plugin
        missing = [one for one in _METHODS.get(kind, ()) if not hasattr(whole, one)]
    except (Exception, SystemExit) as error:
        raise plugin_failure(name, plugin, error) from error
    if missing:
        article = "an" if kind.startswith("a") else "a"
        raise plugin_failure(name, whole, TypeError(f"{article} {kind} must have {' and '.join(missing)}"))
    return GuardedPlugin(name, whole)


class GuardedSessionPlugin:
    """A SessionPlugin. ``profile_name`` was read once, with the file."""

    def __init__(self, guard: GuardedPlugin, profile_name: str) -> None:
        self._guard = guard
        self.profile_name = profile_name

    def note(self, view: View, row: int) -> SessionNote | None:
        """What the session is to keep."""
        given = self._guard.call("note", _read_only_view(view), row)
        if given is not None and not isinstance(given, SessionNote):
            self._guard.raise_wrong_return("note", _short(given), "a SessionNote, or None")
        return given


class GuardedReporter:
    """A UsageReporter. Its names were read once, with the file."""

    def __init__(self, guard: GuardedPlugin, namespace: str, name: str) -> None:
        self._guard = guard
        self.namespace = namespace
        self.name = name

    def value(self, usage: Mapping[str, object]) -> int:
        """The number."""
        given = self._guard.call("value", MappingProxyType(dict(usage)))
        if not isinstance(given, int | float) or not math.isfinite(given):
            self._guard.raise_wrong_return("value", _short(given), "a finite number")
        return int(given)


class _ReadOnlyTable:
    """An EndpointTable whose columns cannot be written to; lists are copies."""

    __slots__ = ("_table",)

    def __init__(self, table: EndpointTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of every column
        value = getattr(self._table, name)
        if isinstance(value, np.ndarray):
            return _read_only(value)
        return tuple(value) if isinstance(value, list) else value


def _read_only_view(view: View) -> View:
    demand, request = view.demand, view.request
    return msgspec.structs.replace(
        view,
        table=cast("EndpointTable", _ReadOnlyTable(view.table)),
        demand=msgspec.structs.replace(
            demand,
            cached_tokens=_read_only(demand.cached_tokens),
            work=_read_only(demand.work),
            tiers=MappingProxyType({name: _read_only(column) for name, column in demand.tiers.items()}),
        ),
        request=msgspec.structs.replace(request, headers=MappingProxyType(dict(request.headers))),
        eligible=None if view.eligible is None else _read_only(view.eligible),
    )


def _read_only(column: NDArray[Any]) -> NDArray[Any]:
    shown = column.view()
    shown.flags.writeable = False
    return shown


def plugin_failure(plugin: str, made: object, error: BaseException) -> PluginFailed:
    """A PluginFailed for a plugin's exception. ``made``: the plugin, or its class, whose file is named if the error
    came through it.
    """
    cls = made if isinstance(made, type) else type(made)
    return PluginFailed(plugin, error, raised_at(error, getattr(sys.modules.get(cls.__module__), "__file__", None)))


def raised_at(error: BaseException, file: str | None = None) -> str:
    """File and line: the innermost in ``file``, else the innermost that is not of this module or of an import."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames, at = list[tuple[str, int]](), error.__traceback__
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith("<frozen importlib"):
            frames.append((name, at.tb_lineno))
        at = at.tb_next
    for name, line in reversed([one for one in frames if one[0] == file] or frames):
        return f"{name}:{line}"
    return ""


def _short(value: object) -> str:
    try:
        shown = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001 - a plugin's value may do anything
        shown = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def try_out(picker: ConfiguredPicker, labels: Sequence[Mapping[str, str]] = ()) -> dict[str, PluginFailed]:
    """Run every plugin on made-up requests and tables of none, one and several endpoints; the first failure of each.

    ``labels``: of endpoints that it will meet; besides them there are some without labels.
    """
    failed = dict[str, PluginFailed]()
    tables: list[list[Mapping[str, str]]] = [[], [{}], [{}, *labels, {}]]
    for endpoints in tables:
        for view in _made_up(endpoints):
            for attempt in _attempts(picker, view):
                try:
                    attempt()
                except PluginFailed as error:
                    failed.setdefault(error.plugin, error)
                except Refusal:
                    # that is an answer, too
                    continue
            for one in view.failed:
                failed.setdefault(one.plugin, one)
    return failed


def _attempts(picker: ConfiguredPicker, view: View) -> Iterator[Callable[[], object]]:
    """Each plugin by itself, as one may see nothing of a request behind another one; then all together."""
    rng, rows = random.Random(0), np.flatnonzero(view.table.is_active)
    for admitter in picker.admitters:
        yield partial(admitter.admit, view, rng)
    for reporter in picker.reporters:
        for usage in ({"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}, _USAGE):
            yield partial(reporter.value, usage)
    if rows.size:
        candidates, (row, *_) = view.candidates(), rows.tolist()
        for profile in picker.profiles.values():
            yield from (partial(one.plugin.keep, view, candidates) for one in profile.filters)
            yield from (partial(one.plugin.score, view, candidates) for one in profile.scorers)
            for scores in (np.zeros(rows.size), np.linspace(0.0, 1.0, rows.size)):
                yield partial(_select, profile.selector, scores, rng)
        yield from (partial(one.wants_prefill, view, row) for one in picker.deciders.values())
        yield from (partial(one.note, view, row) for one in picker.sessions)
    yield partial(picker.pick, view, rng=rng)


def _select(selector: Selector, scores: Floats, rng: random.Random) -> object:
    return selector.max_num_of_endpoints, selector.order(scores, rng, 1)


def _made_up(endpoints: Sequence[Mapping[str, str]]) -> Iterator[View]:
    """A request without a prompt, one with a prompt that an endpoint has cached, and one for an adapter."""
    table = EndpointTable()
    table.replace_endpoints(
        {f"192.0.2.{number}:8000": EndpointConfig(one) for number, one in enumerate(endpoints, start=1)}
    )
    sessions = TenantSessions(SessionBindings(), "")
    for tokens, adapter, headers in ((0.0, None, {}), (2_000.0, None, {}), (2_000.0, "adapter", {"x-session-id": "1"})):
        held = np.zeros(len(table.addresses))
        held[:1] = tokens / 2
        demand = RequestDemandByRow(held, PromptCost().prefill_work(tokens - held, held))
        request = RequestFacts(adapter or "model", tokens, adapter, headers, is_trusted=True, priority=-1)
        yield View(table, demand, request, 1.0, sessions=sessions)
