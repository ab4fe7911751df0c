# SPDX-License-Identifier: Apache-2.0
"""A picker stays, with what it has learned, as long as what it was made from stays."""

from __future__ import annotations

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import SnapshotLoader, load_snapshot
from extproc.llmd.picker_builder import PickerFactory, picker_notes
from extproc.scheduling.builtin_pickers import PrefillDecodePairs, RoundRobin
from extproc.scheduling.disaggregation import ExpectedSeconds, UncachedTokens
from extproc.scheduling.framework import ConfiguredPicker
from extproc.scheduling.picker_cache import pickers_for

SERVERS = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: turns}
spec: {model: m, endpoints: [], picker: RoundRobin}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llm-d}
spec: {model: m, endpoints: [], pickerConfig: epp.yaml}
"""
EPP = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: random-picker}]
"""


def files(servers: str = SERVERS, epp: str = EPP) -> dict[str, bytes]:
    return {"servers.yaml": servers.encode(), "epp.yaml": epp.encode()}


def test_every_server_has_a_picker() -> None:
    made = pickers_for(load_snapshot(files()), {}, PickerFactory())
    assert isinstance(made["default/turns"].picker, RoundRobin)
    assert isinstance(made["default/llm-d"].picker, ConfiguredPicker)


@pytest.mark.parametrize(
    ("servers", "epp"),
    [
        (SERVERS, EPP),
        (SERVERS.replace("endpoints: []", 'endpoints: [{address: "10.0.0.1:1"}]'), EPP),
        (SERVERS.replace("endpoints: []", "endpoints: [], scrapeInterval: 7s"), EPP),
        (SERVERS, "# a comment\n" + EPP),
    ],
)
@pytest.mark.parametrize("loader", [None, SnapshotLoader()])
def test_changes_that_do_not_concern_a_picker_keep_it(servers: str, epp: str, loader: SnapshotLoader | None) -> None:
    read = load_snapshot if loader is None else loader.load
    before = pickers_for(read(files()), {}, PickerFactory())
    after = pickers_for(read(files(servers, epp)), before, PickerFactory())
    assert {key: made.picker for key, made in after.items()} == {key: made.picker for key, made in before.items()}
    assert all(after[key].picker is before[key].picker for key in before)


def test_a_changed_file_makes_the_pickers_new_that_name_it() -> None:
    before = pickers_for(load_snapshot(files()), {}, PickerFactory())
    after = pickers_for(
        load_snapshot(files(epp=EPP.replace("random-picker", "max-score-picker"))), before, PickerFactory()
    )
    assert after["default/turns"].picker is before["default/turns"].picker
    assert "MaxScore" in repr(after["default/llm-d"].picker)


def test_another_picker_or_pairs_make_a_new_one() -> None:
    before = pickers_for(load_snapshot(files()), {}, PickerFactory())
    turned = SERVERS.replace("picker: RoundRobin", "pdGroup: {prefillLabels: {r: p}, decodeLabels: {r: d}}")
    after = pickers_for(load_snapshot(files(turned)), before, PickerFactory())
    assert type(after["default/turns"].picker).__name__ == "PrefillDecodePairs"


@pytest.mark.parametrize(
    ("group", "engine", "decider"),
    [
        ("", "vLLM", ExpectedSeconds(512.0, 0.2)),
        (", minUncachedTokens: 100, stallWeight: 0.6", "TensorRT-LLM", ExpectedSeconds(100.0, 0.6)),
        (", minUncachedTokens: 100, decideBy: UncachedTokens", "vLLM", UncachedTokens(100.0)),
        # its decode engines cannot prefill, whatever is configured
        (", minUncachedTokens: 100", "SGLang", UncachedTokens(0)),
    ],
)
def test_how_pairs_decide_is_configured(group: str, engine: str, decider: object) -> None:
    turned = SERVERS.replace(
        "picker: RoundRobin", f"engine: {engine}, pdGroup: {{prefillLabels: {{r: p}}, decodeLabels: {{r: d}}{group}}}"
    )
    picker = pickers_for(load_snapshot(files(turned)), {}, PickerFactory())["default/turns"].picker
    assert isinstance(picker, PrefillDecodePairs)
    assert picker.decide == decider


def test_the_mistakes_of_all_pickers_are_told_once_each_and_nothing_is_made() -> None:
    more = SERVERS + "---\n" + SERVERS.split("---\n")[1].replace("llm-d", "other")
    before = pickers_for(load_snapshot(files(more)), {}, PickerFactory())
    kept = dict(before)
    with pytest.raises(ConfigInvalid) as caught:
        pickers_for(load_snapshot(files(more, EPP.replace("queue-scorer", "queue-scorr"))), before, PickerFactory())
    assert [one.path for one in caught.value.mistakes] == ["plugins[0].type"]
    assert before == kept


def test_a_precise_scorer_says_what_it_is_without_events() -> None:
    epp = EPP.replace("random-picker", "precise-prefix-cache-scorer")
    without = "ModelServer default/llm-d: precise-prefix-cache-scorer: it has no kvEvents"
    assert any(without in note for note in picker_notes(load_snapshot(files(epp=epp))))
    with_events = SERVERS.replace("pickerConfig: epp.yaml", "pickerConfig: epp.yaml, kvEvents: {port: 5557}")
    assert not any("it has no kvEvents" in note for note in picker_notes(load_snapshot(files(with_events, epp))))


def test_a_context_length_label_that_cannot_be_read_is_told() -> None:
    epp = EPP.replace("random-picker", "context-length-aware")
    endpoints = """endpoints: [
      {address: "10.0.0.1:1", labels: {llm-d.ai/context-length-range: 0-8k}},
      {address: "10.0.0.2:1", labels: {llm-d.ai/context-length-range: 0-8192}}, {address: "10.0.0.3:1"}]"""
    servers = SERVERS.replace("endpoints: [], pickerConfig", f"{endpoints}, pickerConfig")
    told = [note for note in picker_notes(load_snapshot(files(servers, epp))) if "is no range" in note]
    assert len(told) == 1
    assert "10.0.0.1:1" in told[0]
    assert "'0-8k'" in told[0]
