# SPDX-License-Identifier: Apache-2.0
"""Plugins of other packages: whatever they raise or return, the request is decided, and who failed is known."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.llmd.picker_builder import BuiltPicker, picker_from_text
from extproc.llmd.plugin_types import BUILT_IN, installed_plugins
from extproc.refusals import NoEndpoint, Shed
from extproc.scheduling.builtin_pickers import PrefixAware, PrefixAwareParameters
from extproc.scheduling.external_plugin_guards import try_out
from extproc.scheduling.picker import Pick, View
from extproc.scheduling.registry import Kind, PluginType
from extproc.scheduling.sessions import SessionNote
from tests.extproc.scheduling.plugins.views import view_of
from tests.plugin_package import HEAD, install_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HEADER = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
METHODS = {
    "filter": ["keep"],
    "scorer": ["score"],
    "picker": ["order"],
    "decider": ["wants_prefill"],
    "profile handler": ["run"],
    "admitter": ["admit"],
}
DISAGGREGATED = """
- {type: disagg-profile-handler, parameters: {deciderPluginName: theirs}}
- {type: max-score-picker}
schedulingProfiles: [{name: decode, plugins: []}, {name: prefill, plugins: []}]
"""


def plugin(kind: Kind, does: Callable[..., Any], **more: object) -> PluginType:
    """A plugin whose methods all are ``does``."""
    methods = {name: staticmethod(lambda *given, **_: does(*given)) for name in METHODS[kind]}
    fixed = {"needs": lambda *_: None, "max_num_of_endpoints": None, **more}
    return PluginType(kind, type("Theirs", (msgspec.Struct,), {**methods, **fixed, "__module__": __name__}))


def built(theirs: PluginType, more: str = "") -> BuiltPicker:
    text = f"{HEADER}plugins:\n- {{type: theirs}}\n{more}"
    return picker_from_text("epp.yaml", text, {**BUILT_IN, "theirs": msgspec.structs.replace(theirs, is_external=True)})


def raises(*_: object) -> object:
    raise ZeroDivisionError("their mistake")


def usual(view: View) -> list[int]:
    """What the default picker would pick."""
    return PrefixAware(PrefixAwareParameters()).pick(view, rng=random.Random(0)).rows


def busy(count: int = 3) -> View:
    """The last is best, for it has least to do."""
    requests = list(range(50 * count, 0, -50))
    return view_of(count, in_flight=requests, running=requests)


SCORES_WRONGLY: dict[str, Callable[..., object]] = {
    "raises": raises,
    "ends the process": lambda *_: sys.exit(3),
    "too few": lambda *_: np.zeros(2),
    "a column": lambda _, candidates: np.zeros((candidates.size, 1)),
    "a number": lambda *_: 1.0,
    "nothing": lambda *_: None,
    "words": lambda _, candidates: np.full(candidates.size, "best"),
    "objects": lambda _, candidates: np.full(candidates.size, object()),
    "ragged": lambda *_: [[1.0], [1.0, 2.0]],
    "complex": lambda _, candidates: np.zeros(candidates.size, complex),
    "nan": lambda _, candidates: np.full(candidates.size, np.nan),
    "one infinite": lambda _, candidates: np.where(np.arange(candidates.size) == 1, np.inf, 0.0),
    "empties the candidates": lambda _, candidates: candidates.fill(False),
    "writes to a column": lambda view, _: view.table.in_flight.fill(0),
    "writes to the demand": lambda view, _: view.demand.work.fill(0),
    "replaces a column": lambda view, _: setattr(view.table, "in_flight", 0),
    "writes to headers": lambda view, _: view.request.headers.update(x="1"),
}


@pytest.mark.parametrize("does", SCORES_WRONGLY.values(), ids=SCORES_WRONGLY)
def test_where_a_scorer_fails_the_default_picker_decides_and_nothing_is_changed(does: Callable[..., object]) -> None:
    view = busy()
    before, work = view.table.in_flight.copy(), view.demand.work.copy()
    picker = built(plugin("scorer", does)).picker
    assert picker.pick(view, rng=random.Random(0)).rows == usual(view) == [2, 1, 0]
    assert [one.plugin for one in view.failed] == ["theirs"]
    assert (view.table.in_flight == before).all()
    assert (view.demand.work == work).all()
    assert view.request.headers == {}
    assert view.table.is_active[:3].all()


def test_what_a_scorer_gives_to_endpoints_that_are_out_does_not_matter() -> None:
    view = busy()
    scores = plugin("scorer", lambda _, candidates: np.where(candidates, np.arange(candidates.size) / 9, np.nan))
    only = np.arange(view.table.is_active.size) < 2
    assert built(scores).picker.pick(view.with_candidates(only), rng=random.Random(0)).rows == [1, 0]
    assert view.failed == []


def test_whole_numbers_and_lists_are_scores_too() -> None:
    view = busy()
    scores = plugin("scorer", lambda _, candidates: [int(row == 1) for row in range(candidates.size)])
    assert built(scores).picker.pick(view, rng=random.Random(0)).rows[0] == 1
    assert view.failed == []


def test_filters_of_ours_hold_where_a_scorer_fails() -> None:
    view = busy()
    view.table.configs[0] = msgspec.structs.replace(view.table.configs[0], labels={"zone": "a"})
    filters = '- {type: by-label, parameters: {label: zone, validValues: ["a"]}}\n'
    assert built(plugin("scorer", raises), filters).picker.pick(view, rng=random.Random(0)).rows == [0]


@pytest.mark.parametrize(
    "does",
    [
        raises,
        lambda *_: np.ones(2, np.bool_),
        lambda _, candidates: candidates.astype(int),
        lambda _, candidates: candidates.nonzero()[0],
        lambda *_: None,
    ],
)
def test_a_filter_that_fails_keeps_every_endpoint(does: Callable[..., object]) -> None:
    view = busy()
    assert sorted(built(plugin("filter", does)).picker.pick(view, rng=random.Random(0)).rows) == [0, 1, 2]
    assert [one.plugin for one in view.failed] == ["theirs"]


def test_a_filter_of_theirs_that_a_tree_of_ours_runs_fails_as_one_by_itself() -> None:
    view = busy()
    tree = "- {type: decision-tree-filter, parameters: {current: {pluginRef: theirs}}}\n"
    profile = "schedulingProfiles: [{name: default, plugins: [{pluginRef: decision-tree-filter}]}]"
    picker = built(plugin("filter", raises), tree + profile).picker
    assert sorted(picker.pick(view, rng=random.Random(0)).rows) == [0, 1, 2]
    assert [one.plugin for one in view.failed] == ["theirs"]


def test_a_filter_that_leaves_none_is_obeyed() -> None:
    picker = built(plugin("filter", lambda _, candidates: np.zeros_like(candidates))).picker
    with pytest.raises(NoEndpoint, match="theirs"):
        picker.pick(busy(), rng=random.Random(0))


@pytest.mark.parametrize(
    "order", [raises, lambda *_: [], lambda *_: [3], lambda *_: [-1], lambda *_: [0, 0], lambda *_: [0.5], lambda *_: 1]
)
def test_where_a_picker_fails_the_default_picker_decides(order: Callable[..., object]) -> None:
    view = busy()
    assert built(plugin("picker", order)).picker.pick(view, rng=random.Random(0)).rows == usual(view)
    assert [one.plugin for one in view.failed] == ["theirs"]


def test_a_picker_that_names_more_than_it_is_asked_for_fails() -> None:
    view = busy().with_candidates(np.ones(8, np.bool_), choices=2)
    assert built(plugin("picker", lambda *_: [0, 1, 2])).picker.pick(view, rng=random.Random(0)).rows == [2, 1]
    assert [str(one).partition(" (")[0] for one in view.failed] == [
        "TypeError: 'order' returned [0, 1, 2]; return 1 to 2 different positions below 3"
    ]


@pytest.mark.parametrize("most", [0, "two", 1.5])
def test_a_picker_with_an_odd_number_of_endpoints_fails(most: object) -> None:
    view = busy()
    picker = built(plugin("picker", lambda *_: [0], max_num_of_endpoints=most)).picker
    assert picker.pick(view, rng=random.Random(0)).rows == usual(view)


def test_a_decider_that_fails_leaves_prefill_with_decode() -> None:
    for does in (raises, lambda *_: None, lambda *_: np.ones(3)):
        view = busy()
        pick = built(plugin("decider", does), DISAGGREGATED).picker.pick(view, rng=random.Random(0))
        assert pick.prefill_row is None
        assert [one.plugin for one in view.failed] == ["theirs"]


@pytest.mark.parametrize(
    "run",
    [
        raises,
        lambda *_: None,
        lambda *_: Pick([], 0.0),
        lambda *_: Pick([7], 0.0),
        lambda *_: Pick([-1], 0.0),
        lambda *_: Pick(["0"], 0.0),  # type: ignore[list-item]
        lambda *_: Pick([0], float("nan")),
        lambda *_: Pick([0], -1.0),
        lambda *_: Pick([0], 0.0, prefill_row=99),
    ],
)
def test_where_a_handler_fails_the_only_profile_runs_and_of_several_the_default_picker_decides(
    run: Callable[..., object],
) -> None:
    view = busy()
    one = "- {type: running-requests-size-scorer}\n"
    assert built(plugin("profile handler", run), one).picker.pick(view, rng=random.Random(0)).rows[0] == 2
    two = "schedulingProfiles: [{name: a, plugins: []}, {name: b, plugins: []}]"
    assert built(plugin("profile handler", run), two).picker.pick(view, rng=random.Random(0)).rows == usual(view)
    assert [each.plugin for each in view.failed] == ["theirs", "theirs"]


def test_a_handler_that_runs_a_profile_is_obeyed() -> None:
    view = busy()
    theirs = plugin("profile handler", lambda view, profiles, _, rng: profiles["b"].pick(view, rng=rng))
    two = "- {type: running-requests-size-scorer}\nschedulingProfiles: [{name: a, plugins: []}, {name: b, plugins: "
    two += "[{pluginRef: running-requests-size-scorer}]}]"
    assert built(theirs, two).picker.pick(view, rng=random.Random(0)).rows[0] == 2
    assert view.failed == []


def test_an_admitter_that_fails_admits_and_one_that_sheds_is_obeyed() -> None:
    view = busy()
    built(plugin("admitter", raises)).picker.admit(view, rng=random.Random(0))
    assert [one.plugin for one in view.failed] == ["theirs"]

    def shed(*_: object) -> None:
        raise Shed("full")

    with pytest.raises(Shed):
        built(plugin("admitter", shed)).picker.admit(busy(), rng=random.Random(0))


@pytest.mark.parametrize("note", [raises, lambda *_: "10.0.0.1:8000"])
def test_a_session_of_a_plugin_that_fails_keeps_nothing(note: Callable[..., object]) -> None:
    view = busy()
    theirs = plugin("filter", lambda _, candidates: candidates, profile_name="", note=lambda _, *given: note(*given))
    picker = built(theirs).picker
    pick = picker.pick(view, rng=random.Random(0))
    assert picker.session_notes(view, pick) == ()
    assert [one.plugin for one in view.failed] == ["theirs"]


def test_a_session_keeper_of_another_package_keeps_sessions() -> None:
    view = busy()
    noted = SessionNote("e2:1", header="x-session")
    theirs = plugin("filter", lambda _, candidates: candidates, profile_name="", note=lambda *_: noted)
    picker = built(theirs).picker
    assert picker.session_notes(view, picker.pick(view, rng=random.Random(0))) == (noted,)


def test_a_mistake_of_ours_is_raised_and_hidden_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object) -> object:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(BUILT_IN["queue-scorer"].cls, "score", mistaken)
    theirs = plugin("filter", lambda _, candidates: candidates)
    with pytest.raises(ZeroDivisionError, match="ours"):
        built(theirs, "- {type: queue-scorer}\n").picker.pick(busy(), rng=random.Random(0))


@pytest.mark.parametrize("kind", ["filter", "scorer", "picker", "decider", "profile handler", "admitter"])
def test_check_finds_a_plugin_of_every_kind_that_raises(kind: Kind) -> None:
    more = DISAGGREGATED if kind == "decider" else ""
    failed = try_out(built(plugin(kind, raises), more).picker)
    assert list(failed) == ["theirs"]
    assert failed["theirs"].where.startswith(__file__)


SOMETIMES: dict[str, Callable[[View], bool]] = {
    "without a prompt": lambda view: view.request.input_tokens == 0,
    "with a prompt": lambda view: view.request.input_tokens > 0,
    "with one endpoint": lambda view: len(view.table) == 1,
    "with several endpoints": lambda view: len(view.table) > 1,
    "with an adapter": lambda view: view.request.adapter is not None,
    "without labels": lambda view: any(not one.labels for one in view.table.configs[: len(view.table)]),
    "with labels": lambda view: any(one.labels for one in view.table.configs),
}


@pytest.mark.parametrize("when", SOMETIMES.values(), ids=SOMETIMES)
def test_check_finds_a_plugin_that_raises_only_for_some_requests(when: Callable[[View], bool]) -> None:
    def score(view: View, candidates: np.ndarray[Any, Any]) -> object:
        return raises() if when(view) else np.zeros(candidates.size)

    assert list(try_out(built(plugin("scorer", score)).picker, [{"zone": "a"}])) == ["theirs"]


def test_check_finds_an_admitter_that_fails_where_there_is_no_endpoint() -> None:
    admitter = plugin("admitter", lambda view, _: view.table.in_flight[view.candidates()].max())
    assert try_out(built(admitter).picker) == {}
    careless = plugin("admitter", lambda view, _: max(view.table.active_rows))
    assert list(try_out(built(careless).picker)) == ["theirs"]


def test_check_tries_plugins_that_a_filter_of_ours_would_keep_from_made_up_endpoints() -> None:
    filters = '- {type: by-label, parameters: {label: zone, validValues: ["nowhere"]}}\n'
    assert list(try_out(built(plugin("scorer", raises), filters).picker)) == ["theirs"]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("scorer", {}, "TypeError: a scorer must have score"),
        ("picker", {"order": raises}, "TypeError: a picker must have max_num_of_endpoints"),
        ("admitter", {}, "TypeError: an admitter must have admit"),
        ("scorer", {"score": raises, "with_plugins": raises}, "ZeroDivisionError: their mistake"),
        ("screener", {"keep": raises, "paired": raises}, "ZeroDivisionError: their mistake"),
        ("profile handler", {"run": raises, "needs": raises}, "ZeroDivisionError: their mistake"),
        ("reporter", {"reporter": raises}, "ZeroDivisionError: their mistake"),
        ("scorer", {"score": raises, "__post_init__": raises}, "'theirs' cannot be made: ZeroDivisionError: "),
    ],
)
def test_a_plugin_that_cannot_be_made_is_a_mistake_on_its_line(
    kind: Kind, fields: Mapping[str, object], said: str
) -> None:
    theirs = PluginType(kind, type("Theirs", (msgspec.Struct,), {**fields, "__module__": __name__}))
    with pytest.raises(ConfigInvalid) as refused:
        built(theirs)
    (mistake,) = refused.value.mistakes
    assert mistake.line == 4
    assert said in mistake.message


def test_a_reporter_that_fails_reports_nothing() -> None:
    answers = iter([41.5, float("nan"), "many", None])
    reporter = SimpleNamespace(namespace="n", name="tokens", value=lambda _: next(answers))
    theirs = PluginType("reporter", type("Theirs", (msgspec.Struct,), {"reporter": lambda _: reporter}))
    (made,) = built(theirs).picker.reporters
    assert (made.namespace, made.name, made.value({})) == ("n", "tokens", 41)
    for _ in range(3):
        with pytest.raises(Exception, match="return a finite number"):
            made.value({})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_like_it\n", "cannot be loaded: ModuleNotFoundError"),
        ("def broken(:\n", "cannot be loaded: SyntaxError"),
        ("raise SystemExit(3)\n", "cannot be loaded: SystemExit"),
        ("THEIRS = 3\n", "is no plugin"),
        (HEAD + "THEIRS = PluginType('scorer', int)\n", "is no plugin"),
        (HEAD + "class A(msgspec.Struct): ...\nTHEIRS = PluginType('scorrer', A)\n", "has the kind 'scorrer'"),
    ],
)
def test_a_package_that_cannot_be_used_harms_only_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    name = f"odd_{abs(hash(source))}"
    install_plugin(tmp_path, source, {"theirs": f"{name}:THEIRS"}, name)
    monkeypatch.syspath_prepend(tmp_path)
    known = installed_plugins()
    picker_from_text("epp.yaml", f"{HEADER}plugins: [{{type: queue-scorer}}]\n", known)
    with pytest.raises(ConfigInvalid, match=said):
        picker_from_text("epp.yaml", f"{HEADER}plugins: [{{type: theirs}}]\n", known)
