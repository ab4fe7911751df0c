# SPDX-License-Identifier: Apache-2.0
"""Which adapter is loaded, and which one goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.agents.runtime.adapter_loader import (
    AdapterAction,
    AdapterChanges,
    EngineAdapterState,
    LoadedAdapter,
    LoadFailures,
    WantedAdapters,
    adapter_changes,
    adapter_to_evict,
    next_adapter_action,
    retry_at_s,
)
from controller.agents.runtime.declared_adapters import DeclaredAdapter

NAMES = st.sampled_from("abcdef")


def shelf(*adapters: LoadedAdapter, limit: int = 2, pinned: str = "", tells_use: bool = True) -> EngineAdapterState:
    return EngineAdapterState({one.name: one for one in adapters}, frozenset(pinned), limit, tells_use)


def step(held: EngineAdapterState, name: str, path: str = "") -> AdapterAction:
    return next_adapter_action(held, name, path, keep_s=10.0, now_s=100.0)


OLD, NEW = LoadedAdapter("old", used_at_s=1.0), LoadedAdapter("new", used_at_s=50.0)


def test_there_is_room() -> None:
    assert step(shelf(OLD), "x") == AdapterAction("load", "x")
    assert step(shelf(OLD, NEW, limit=0), "x") == AdapterAction("load", "x")


def test_what_is_there_stays() -> None:
    assert step(shelf(OLD, NEW), "old") == AdapterAction("loaded", "old")


def test_the_least_recently_used_goes() -> None:
    assert step(shelf(NEW, OLD), "x") == AdapterAction("unload", "old", "evicted")


def test_equally_old_ones_go_by_name_so_that_the_choice_can_be_repeated() -> None:
    assert adapter_to_evict(shelf(LoadedAdapter("b"), LoadedAdapter("a")), keep_s=1.0, now_s=9.0) == "a"


def test_those_in_use_pinned_or_just_used_stay() -> None:
    in_use = LoadedAdapter("old", used_at_s=1.0, is_in_use=True)
    assert step(shelf(in_use, NEW), "x") == AdapterAction("unload", "new", "evicted")
    assert step(shelf(in_use, LoadedAdapter("new", used_at_s=90.1)), "x").kind == "busy"
    assert step(shelf(OLD, limit=1, pinned=""), "x").kind == "unload"
    assert step(EngineAdapterState({"old": OLD}, frozenset({"old"}), 1), "x").kind == "busy"
    assert step(shelf(OLD, NEW, tells_use=False), "x").kind == "busy"


def test_other_files_under_a_name_replace_it_when_it_is_idle() -> None:
    held = LoadedAdapter("a", path="/one", used_at_s=1.0)
    assert step(shelf(held), "a", "/one").kind == "loaded"
    assert step(shelf(held), "a", "/two") == AdapterAction("unload", "a", "replaced")
    assert step(shelf(LoadedAdapter("a", "/one", 1.0, is_in_use=True)), "a", "/two").kind == "busy"
    # an engine that tells no paths is believed
    assert step(shelf(LoadedAdapter("a")), "a", "/two").kind == "loaded"


@given(
    st.dictionaries(NAMES, st.tuples(st.floats(0, 100), st.booleans())),
    st.frozensets(NAMES),
    st.integers(0, 6),
    NAMES,
)
def test_nothing_pinned_in_use_or_fresh_ever_goes(
    held: dict[str, tuple[float, bool]], pinned: frozenset[str], limit: int, name: str
) -> None:
    adapters = {each: LoadedAdapter(each, "", used_at_s, in_use) for each, (used_at_s, in_use) in held.items()}
    found = step(EngineAdapterState(adapters, pinned, limit), name)
    match found.kind:
        case "unload":
            gone = adapters[found.name]
            assert not gone.is_in_use
            assert gone.name not in pinned
            assert gone.used_at_s <= 90.0
        case "load":
            assert not limit or len(adapters) < limit
            assert name not in adapters
        case "loaded":
            assert name in adapters
        case "busy":
            assert all(one.is_in_use or one.name in pinned or one.used_at_s > 90.0 for one in adapters.values())


def wished(held: EngineAdapterState, **declared: DeclaredAdapter) -> AdapterChanges:
    return adapter_changes(held, WantedAdapters(declared, {}), keep_s=10.0, now_s=100.0)


def test_the_file_is_loaded_in_its_order_while_there_is_room() -> None:
    every = {name: DeclaredAdapter(f"hf://acme/{name}") for name in "abc"}
    assert wished(shelf(limit=2), **every).load == ("a", "b")
    assert wished(shelf(limit=0), **every).load == ("a", "b", "c")
    assert wished(shelf(OLD, NEW), **every).load == ()


def test_pinned_ones_come_first_and_whatever_has_to_go() -> None:
    declared = {"a": DeclaredAdapter("hf://acme/a"), "p": DeclaredAdapter("hf://acme/p", pinned=True)}
    assert wished(shelf(OLD, NEW), **declared).load == ("p",)
    assert wished(shelf(OLD), **declared).load == ("p",)
    assert wished(shelf(), **declared).load == ("p", "a")


def test_removed_ones_go_when_they_are_idle() -> None:
    busy = LoadedAdapter("busy", used_at_s=1.0, is_in_use=True)
    wishes = WantedAdapters({}, {}, removed=frozenset({"old", "busy", "absent"}))
    assert adapter_changes(shelf(OLD, busy), wishes, keep_s=10.0, now_s=100.0).unload == ("old",)


def test_what_failed_is_tried_later_and_later() -> None:
    declared = {"a": DeclaredAdapter("hf://acme/a")}
    wishes = WantedAdapters(declared, {}, failures={"a": LoadFailures(3, 95.0, "404")})
    assert adapter_changes(shelf(), wishes, keep_s=1.0, now_s=100.0).load == ()
    assert adapter_changes(shelf(), wishes, keep_s=1.0, now_s=103.0).load == ("a",)
    assert [retry_at_s(LoadFailures(times, 0.0, "")) for times in (1, 2, 3, 50)] == [2.0, 4.0, 8.0, 120.0]


def test_a_settled_engine_changes_nothing() -> None:
    declared = {"old": DeclaredAdapter("hf://acme/old", pinned=True), "new": DeclaredAdapter("hf://acme/new")}
    assert wished(shelf(OLD, NEW), **declared) == AdapterChanges()
