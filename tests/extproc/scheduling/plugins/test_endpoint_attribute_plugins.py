# SPDX-License-Identifier: Apache-2.0
"""Filter and scorer by a metric that a file names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints.engine_reports import apply_report
from extproc.engines.dialects import DIALECTS
from extproc.engines.metrics import EngineReport, MetricsReader
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.scheduling.plugins.endpoint_attribute_plugins import EndpointAttributeFilter, EndpointAttributeScorer
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.picker import View

NONE = math.nan


def view(*values: float) -> View:
    found = view_of(len(values))
    for row, value in enumerate(values):
        apply_report(found.table, row, EngineReport(attributes={"depth": value}), 0.0)
    return found


def kept(of: View, kind: str, section: dict[str, Any], **parameters: Any) -> list[int]:  # noqa: ANN401 - of any plugin
    given_parameters = {"attribute": "depth", "algorithm": {"type": kind, kind: section}, **parameters}
    plugin = msgspec.convert(given_parameters, EndpointAttributeFilter)
    return [int(row) for row in plugin.keep(of, of.table.is_active).nonzero()[0]]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("LessThan", [0]),
        ("LessThanOrEqual", [0, 1]),
        ("GreaterThan", [2]),
        ("GreaterThanOrEqual", [1, 2]),
        ("Equal", [1]),
        ("NotEqual", [0, 2]),
    ],
)
def test_a_threshold_compares(operator: str, expected: list[int]) -> None:
    assert kept(view(1, 2, 3), "threshold", {"operator": operator, "value": 2}) == expected


@pytest.mark.parametrize(
    ("kind", "section", "expected"),
    [
        ("range", {"min": 2, "max": 3}, [1, 2]),
        ("topK", {"k": 2}, [2, 3]),
        ("topK", {"k": 2, "higherIsBetter": False}, [0, 1]),
        ("topK", {"k": 9}, [0, 1, 2, 3]),
        # the value of rank ceil(0.5 * 4) = 2 is 2
        ("percentile", {"percentile": 50}, [1, 2, 3]),
        ("percentile", {"percentile": 50, "higherIsBetter": False}, [0, 1]),
        ("percentile", {"percentile": 100}, [3]),
        ("percentile", {"percentile": 0}, [0, 1, 2, 3]),
    ],
)
def test_the_other_algorithms(kind: str, section: dict[str, Any], expected: list[int]) -> None:
    assert kept(view(1, 2, 3, 4), kind, section) == expected
    # one without a value passes and takes no part in the ranking, unless it must fail
    assert kept(view(1, 2, 3, 4, NONE), kind, section) == [*expected, 4]
    assert kept(view(1, 2, 3, 4, NONE), kind, section, onMissing="Fail") == expected


def test_nothing_left_is_nothing_or_all() -> None:
    above = {"operator": "GreaterThan", "value": 9}
    assert kept(view(1, 2), "threshold", above) == []
    assert kept(view(1, 2), "threshold", above, fallbackOnEmpty=True) == [0, 1]
    assert kept(view(NONE, NONE), "percentile", {"percentile": 50}, onMissing="Fail") == []


def scores(of: View, kind: str = "lower", **normalization: Any) -> list[float]:  # noqa: ANN401 - of any range
    parameters = {
        "attributeKey": "depth",
        "algorithm": {"type": f"linear_{kind}_is_better", "normalization": normalization},
    }
    plugin = msgspec.convert(parameters, EndpointAttributeScorer)
    found: list[float] = plugin.score(of, of.table.is_active)[: len(of.table)].tolist()
    return found


def test_scores_are_linear_in_the_range() -> None:
    assert scores(view(2, 4, 10, NONE)) == [1.0, 0.75, 0.0, 0.0]
    assert scores(view(2, 4, 10, NONE), "higher") == [0.0, 0.25, 1.0, 0.0]
    assert scores(view(0.5, 2, NONE), fixedRange={"min": 0, "max": 1}) == [0.5, 0.0, 0.0]
    assert scores(view(7, 7, NONE)) == [1.0, 1.0, 0.0]
    assert scores(view(NONE)) == [0.0]


@given(
    st.lists(st.one_of(st.just(NONE), st.floats(0, 1e9)), min_size=1, max_size=6), st.sampled_from(["lower", "higher"])
)
def test_scores_are_shares_and_follow_the_values(values: list[float], kind: str) -> None:
    found = scores(view(*values), kind)
    assert all(0 <= one <= 1 for one in found)
    known = sorted((value, score) for value, score in zip(values, found, strict=True) if not math.isnan(value))
    ordered = [score for _, score in known]
    assert ordered == sorted(ordered, reverse=kind == "lower")


def test_a_row_that_is_given_to_another_endpoint_has_no_value() -> None:
    found = view(1, 2)
    found.table.replace_endpoints(["e1:1"])
    found.table.replace_endpoints(["e1:1", *(f"new{number}:1" for number in range(20))])
    column = found.table.attributes.column("depth", len(found.table.addresses))
    assert [value for value in column.tolist() if not math.isnan(value)] == [2.0]


PAGE = b"""# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 1.0
queue_depth{tier="gold",rank="0"} 3
queue_depth{tier="gold",rank="1"} 4
queue_depth{tier="free",rank="0"} 9
plain 0.5
"""


def test_metrics_are_read_from_the_engines_page() -> None:
    custom = [("gold", "queue_depth{tier=gold}"), ("all", "queue_depth"), ("plain", "plain"), ("gone", "gone")]
    found = MetricsReader(DIALECTS["vLLM"], custom=custom).read(PAGE).report.attributes
    assert {name: value for name, value in found.items() if name != "gone"} == {"gold": 7, "all": 16, "plain": 0.5}
    assert math.isnan(found["gone"])
    assert MetricsReader(DIALECTS["vLLM"]).read(PAGE).report.attributes == {}


FILE = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: core-metrics-extractor
    parameters:
      defaultEngine: mine
      engineConfigs:
        - name: mine
          queuedRequestsSpec: vllm:num_requests_waiting
          customMetrics: [{attributeKey: depth, metricSpec: "queue_depth{tier=gold}"}]
  - type: endpoint-attribute-scorer
    parameters: {attributeKey: depth, algorithm: {type: linear_lower_is_better}}
"""


def test_a_file_says_which_metrics_are_read() -> None:
    assert picker_from_text("a.yaml", FILE, BUILT_IN).picker.metrics == (("depth", "queue_depth{tier=gold}"),)
