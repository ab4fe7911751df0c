# SPDX-License-Identifier: Apache-2.0
"""EndpointPickerConfigs of several profiles, as their handlers run them."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.endpoints.table import EndpointConfig
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.refusals import BadRequest
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.picker import View

DISAGG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [prepareDataPlugins]
plugins:
  - type: disagg-headers-handler
  - type: approx-prefix-cache-producer
    parameters: {blockSizeTokens: 64, autoTune: true}
  - type: prefix-based-pd-decider
    parameters: {nonCachedTokens: 512}
  - type: disagg-profile-handler
    parameters:
      groupKey: group
      deciders: {prefill: prefix-based-pd-decider}
  - type: prefill-filter
  - type: decode-filter
  - type: queue-scorer
  - type: prefix-cache-scorer
    parameters: {prefixMatchInfoProducerName: approx-prefix-cache-producer}
  - type: max-score-picker
schedulingProfiles:
  - name: prefill
    plugins:
      - pluginRef: prefill-filter
      - pluginRef: queue-scorer
      - pluginRef: max-score-picker
  - name: decode
    plugins:
      - pluginRef: decode-filter
      - pluginRef: prefix-cache-scorer
        weight: 2
      - pluginRef: queue-scorer
      - pluginRef: max-score-picker
"""


def view_of_pairs(
    *, cached: tuple[float, ...] = (), waiting: tuple[float, ...] = (0, 0, 0, 0), **options: object
) -> View:
    view = view_of(4, cached=cached, waiting=waiting, **options)  # type: ignore[arg-type]
    roles = [("prefill", "a"), ("decode", "a"), ("prefill", "b"), ("decode", "b")]
    view.table.replace_endpoints(
        {
            f"e{row}:1": EndpointConfig({"llm-d.ai/role": role, "group": group})
            for row, (role, group) in enumerate(roles)
        }
    )
    return view


def test_prefill_and_decode_are_picked_in_one_group() -> None:
    read = picker_from_text("pd.yaml", DISAGG, BUILT_IN)
    assert any("featureGates" in note for note in read.notes)
    assert any("the pool's own prefix index" in note for note in read.notes)
    pick = read.picker.pick(view_of_pairs(waiting=(9, 0, 0, 5)), rng=random.Random(0))
    # decode first: the shorter queue of the two is in group a, whose prefill engine is then the only one
    assert (pick.rows, pick.prefill_row) == ([1], 0)


def test_the_decider_keeps_a_cached_prompt_with_decode() -> None:
    picker = picker_from_text("pd.yaml", DISAGG, BUILT_IN).picker
    pick = picker.pick(view_of_pairs(cached=(0, 0, 0, 600)), rng=random.Random(0))
    assert (pick.rows[0], pick.prefill_row, pick.stage) == (3, None, "the decider keeps prefill with decode")
    assert picker.pick(view_of_pairs(cached=(0, 0, 0, 400)), rng=random.Random(0)).prefill_row == 2


def test_prefill_first_starts_from_the_prefill_engine() -> None:
    picker = picker_from_text(
        "pd.yaml", DISAGG.replace("groupKey: group", "groupKey: group\n      stageOrder: prefill-first"), BUILT_IN
    ).picker
    pick = picker.pick(view_of_pairs(waiting=(9, 0, 0, 5)), rng=random.Random(0))
    assert (pick.rows, pick.prefill_row) == ([3], 2)


def test_the_older_handler_and_its_parameters_are_read() -> None:
    old = """
      decodeProfile: decode
      prefillProfile: prefill
      deciderPluginName: always-disagg-pd-decider
  - type: always-disagg-pd-decider
"""
    text = DISAGG.replace("disagg-profile-handler", "pd-profile-handler").replace(
        "\n      groupKey: group\n      deciders: {prefill: prefix-based-pd-decider}\n", old
    )
    picker = picker_from_text("pd.yaml", text, BUILT_IN).picker
    assert picker.pick(view_of_pairs(cached=(0, 999, 0, 999)), rng=random.Random(0)).prefill_row in {0, 2}


def test_without_a_prefill_endpoint_the_decode_endpoint_serves_the_whole_request() -> None:
    picker = picker_from_text("pd.yaml", DISAGG, BUILT_IN).picker
    view = view_of_pairs()
    view.table.replace_endpoints({"e1:1": EndpointConfig({"llm-d.ai/role": "decode", "group": "a"})})
    pick = picker.pick(view, rng=random.Random(0))
    assert (pick.rows, pick.prefill_row, pick.stage) == ([1], None, "the prefill profile found no endpoint")


HEADER = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: prefill-filter
  - type: decode-filter
  - type: max-score-picker
  - type: header-profile-handler
schedulingProfiles:
  - name: prefill
    plugins: [{pluginRef: prefill-filter}]
  - name: decode
    plugins: [{pluginRef: decode-filter}]
"""


def test_a_header_names_the_profile() -> None:
    picker = picker_from_text("header.yaml", HEADER, BUILT_IN).picker

    def roles(headers: dict[str, str]) -> set[int]:
        return set(picker.pick(view_of_pairs(headers=headers), rng=random.Random(0)).rows)

    assert roles({"epp-profile": "prefill"}) == {0, 2}
    assert roles({}) == {1, 3}
    with pytest.raises(BadRequest, match="there are decode, prefill"):
        roles({"epp-profile": "fast"})


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        (
            "prefill: prefix-based-pd-decider}",
            "prefill: pd-decider}",
            "pd.yaml:13: plugins[3].parameters.deciders.prefill: no plugin is called 'pd-decider'",
        ),
        ("name: decode\n", "name: decoding\n", "pd.yaml:10: plugins[3]: there is no profile 'decode'"),
        ("name: prefill\n", "name: decode\n", "a second profile called 'decode'"),
        ("- type: queue-scorer", "- type: queue-scorer\n  - type: single-profile-handler", "a second profile handler"),
        (
            "{nonCachedTokens: 512}",
            "{nonCachedTokens: many}",
            "pd.yaml:9: plugins[2].parameters.nonCachedTokens: 'many' is text; write a number",
        ),
    ],
)
def test_mistakes_of_handlers_are_placed(old: str, new: str, mistake: str) -> None:
    text = DISAGG.replace(old, new, 1)
    assert text != DISAGG
    with pytest.raises(ConfigInvalid, match=re.escape(mistake)):
        picker_from_text("pd.yaml", text, BUILT_IN)


def test_plugins_that_refer_to_each_other_in_a_circle_are_refused() -> None:
    text = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: precise-prefix-cache-producer
    parameters: {tokenProducerName: token-producer}
  - type: token-producer
    parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
  - type: queue-scorer
"""
    with pytest.raises(ConfigInvalid, match=r"epp\.yaml:4: .*break the circle"):
        picker_from_text("epp.yaml", text, BUILT_IN)


def test_two_profiles_need_a_handler_that_chooses() -> None:
    text = HEADER.replace("  - type: header-profile-handler\n", "")
    with pytest.raises(ConfigInvalid, match="takes exactly one scheduling profile"):
        picker_from_text("epp.yaml", text, BUILT_IN)


def test_reasons_name_both_profiles() -> None:
    picker = picker_from_text("pd.yaml", DISAGG, BUILT_IN).picker
    view = msgspec.structs.replace(view_of_pairs(), wants_reasons=True)
    assert [one.profile for one in picker.pick(view, rng=random.Random(0)).reasons] == ["decode", "prefill"]


def test_a_configured_picker_avoids_endpoints_in_back_off_if_others_are_left() -> None:
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"
    picker = picker_from_text("a.yaml", text, BUILT_IN).picker
    idle_but_failing = view_of(3, waiting=[0, 5, 9], retry_at_s=[9, 0, 0], trips=[1, 0, 0], now_s=1.0)
    idle_but_failing.table.has_failures = True
    assert picker.pick(idle_but_failing, rng=random.Random(0)).rows == [1, 2]
    all_failing = view_of(3, waiting=[0, 5, 9], retry_at_s=[9, 9, 9], trips=[1, 1, 1], now_s=1.0)
    all_failing.table.has_failures = True
    assert picker.pick(all_failing, rng=random.Random(0)).rows == [0, 1, 2]
