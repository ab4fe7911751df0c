# SPDX-License-Identifier: Apache-2.0
"""The scheduling framework: a profile runs filters, weighted scorers and a selector.

The model is llm-d's (``pkg/epp/scheduling``), on arrays. A filter narrows a mask of rows, a scorer gives each row a
number from 0 to 1, and a selector (llm-d: picker) orders the remaining rows by their weighted total. A profile
handler decides which profiles run. Plugins are pure functions of the ``View``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from extproc.refusals import NoEndpoint
from extproc.scheduling.engine_metrics_config import USUAL_NAMES, EngineMetricNames, MetricsSource
from extproc.scheduling.picker import Pick, Picker, PluginFailed, Reasons, ScorerValues, View, rows_of

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.sessions import SessionNote


class Filter(Protocol):
    """Excludes endpoints."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """The rows of ``candidates`` to keep. If none is left, the profile finds no endpoint."""
        ...


class Scorer(Protocol):
    """Rates endpoints."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """A score for each row, 0 (worst) to 1 (best). Rows outside ``candidates`` must not influence those inside."""
        ...


class Selector(Protocol):
    """Orders endpoints by their scores (llm-d: picker)."""

    @property
    def max_num_of_endpoints(self) -> int | None:
        """The maximum number of endpoints to name, fallbacks included; None: as many as the gateway accepts."""
        ...

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Up to ``count`` positions in ``scores``, best first; None: all of them."""
        ...


class PrefillDecider(Protocol):
    """Decides whether a request is prefilled by an endpoint of its own."""

    def wants_prefill(self, view: View, decode_row: int) -> bool:
        """``decode_row``: the endpoint that will decode."""
        ...


@runtime_checkable
class SessionPlugin(Protocol):
    """Keeps the requests of a session on one endpoint."""

    @property
    def profile_name(self) -> str:
        """The profile whose endpoint is kept; empty: the one that answers."""
        ...

    def note(self, view: View, row: int) -> SessionNote | None:
        """The note to keep for the request's session if ``row`` gets the request; None: nothing."""
        ...


class UsageReporter(Protocol):
    """Reports to the gateway a number derived from an answer's token usage."""

    @property
    def namespace(self) -> str:
        """Of the gateway's dynamic metadata."""
        ...

    @property
    def name(self) -> str:
        """The key in the namespace."""
        ...

    def value(self, usage: Mapping[str, object]) -> int:
        """The number; 0 for none. ``usage``: as in an answer of OpenAI's API."""
        ...


class Admitter(Protocol):
    """Decides whether a request is served at all."""

    def admit(self, view: View, rng: random.Random) -> None:
        """Raise Shed if it is not. ``view``: all endpoints that may serve it, with and without room."""
        ...


@runtime_checkable
class NeedsPlugins(Protocol):
    """Parameters whose plugin depends on other plugins of the same file."""

    def with_plugins(self, others: Mapping[str, Any]) -> Any:  # noqa: ANN401 - plugins have no type in common
        """The plugin itself. ``others``: all plugins of the file by their names, as their parameters."""
        ...


class NamedFilter(msgspec.Struct, frozen=True):
    """A filter and its configured name."""

    name: str
    plugin: Filter


class NamedScorer(msgspec.Struct, frozen=True):
    """A scorer, its configured name, and its weight in the total."""

    name: str
    plugin: Scorer
    weight: float = 1.0


class Profile(msgspec.Struct, frozen=True):
    """Filters in their order, scorers with their weights, and a selector.

    ``default``: orders what the filters leave where a scorer or the selector fails; set if one of them is of another
    package.
    """

    filters: tuple[NamedFilter, ...]
    scorers: tuple[NamedScorer, ...]
    selector: Selector
    name: str = "default"
    default: Picker | None = None

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Run the profile. Raises NoEndpoint, naming the filter that excluded the last endpoint.

        A filter that fails keeps every endpoint.
        """
        candidates = start = view.candidates()
        after_filters = list[tuple[str, tuple[int, ...]]]()
        for one in self.filters:
            try:
                candidates = candidates & one.plugin.keep(view, candidates)
            except PluginFailed as failed:
                view.failed.append(failed)
            if view.wants_reasons:
                after_filters.append((one.name, rows_of(candidates)))
            if not candidates.any():
                msg = f"No engine is left for this request after '{one.name}'; try again later."
                raise NoEndpoint(msg)
        try:
            return self._best(view, start, after_filters, candidates, rng)
        except PluginFailed as failed:
            if self.default is None:
                raise
            view.failed.append(failed)
            return self.default.pick(view.with_candidates(candidates), rng=rng)

    def _best(
        self,
        view: View,
        start: Bools,
        after_filters: list[tuple[str, tuple[int, ...]]],
        candidates: Bools,
        rng: random.Random,
    ) -> Pick:
        """Score ``candidates`` and select; the others are for the reasons. Raises PluginFailed."""
        rows = candidates.nonzero()[0]
        total = np.zeros(rows.size)
        scored = []
        for scorer in self.scorers:
            values = scorer.plugin.score(view, candidates)[rows].clip(0.0, 1.0)
            total += scorer.weight * values
            if view.wants_reasons:
                scored.append(ScorerValues(scorer.name, scorer.weight, values))
        count = min(view.choices, self.selector.max_num_of_endpoints or view.choices)
        chosen: list[int] = rows[self.selector.order(total, rng, count)].tolist()
        reasons: tuple[Reasons, ...] = ()
        if view.wants_reasons:
            reasons = (Reasons(self.name, rows_of(start), tuple(after_filters), tuple(rows.tolist()), tuple(scored)),)
        return Pick(chosen, float(view.ttft_s()[chosen[0]]), reasons=reasons)


class ProfileHandler(Protocol):
    """Decides which profiles run, and combines their picks into one."""

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """An error message if the handler cannot work with these profiles, else None."""
        ...

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """Pick endpoints with ``profiles`` and ``deciders``, both by name. Raises NoEndpoint."""
        ...


class ConfiguredPicker(msgspec.Struct, frozen=True):
    """The picker that an EndpointPickerConfig describes: profiles and their handler.

    ``sessions``: the plugins that keep sessions on their endpoints. ``prefill_profile``: its name, empty if there is
    none. ``reporters``: numbers for the gateway about each answer. ``admitters``: decide before a pick, in ``admit``,
    whether the request is served at all. ``metrics``: attributes of endpoints, each with the metric of the engine that
    has its value, such as ``queue{tier=gold}``. ``tiers``: prefix caches with a capacity of their own, in tokens by
    name. ``default``: picks where the handler fails; set if a plugin is of another package.
    ``source``: location of the engines' metrics pages, if the file has it; ``names``: of their metrics.
    """

    handler: ProfileHandler
    profiles: Mapping[str, Profile]
    deciders: Mapping[str, PrefillDecider] = {}
    sessions: tuple[SessionPlugin, ...] = ()
    prefill_profile: str = ""
    reporters: tuple[UsageReporter, ...] = ()
    admitters: tuple[Admitter, ...] = ()
    metrics: tuple[tuple[str, str], ...] = ()
    tiers: Mapping[str, float] = {}
    default: Picker | None = None
    source: MetricsSource | None = None
    names: EngineMetricNames = USUAL_NAMES

    def admit(self, view: View, *, rng: random.Random) -> None:
        """Run the admitters; raises Shed. One that fails admits."""
        for one in self.admitters:
            try:
                one.admit(view, rng)
            except PluginFailed as failed:
                view.failed.append(failed)

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Run the handler; those whose breakers are open only if no other may serve the request."""
        if view.table.has_failures:
            view = view.with_candidates(view.preferred(view.candidates()))
        try:
            return self.handler.run(view, self.profiles, self.deciders, rng)
        except PluginFailed as failed:
            if self.default is None:
                raise
            view.failed.append(failed)
        # which of several profiles the handler would have run is not known
        (only, *others) = self.profiles.values()
        return (self.default if others else only).pick(view, rng=rng)

    def session_notes(self, view: View, pick: Pick) -> tuple[SessionNote, ...]:
        """The notes of a pick to keep for the request's sessions."""
        notes = []
        for session_plugin in self.sessions:
            is_prefill = session_plugin.profile_name and session_plugin.profile_name == self.prefill_profile
            row = pick.prefill_row if is_prefill else pick.rows[0]
            try:
                note = None if row is None else session_plugin.note(view, row)
            except PluginFailed as failed:
                view.failed.append(failed)
                continue
            if note is not None:
                notes.append(note)
        return tuple(notes)
