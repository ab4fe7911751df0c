# SPDX-License-Identifier: Apache-2.0
"""Where engines' metrics are and what they are called: the file before the ModelServer, the label before both."""

from __future__ import annotations

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.document_decoder import read_picker_file
from extproc.api.engine_connection import EngineConnection, EngineTls
from extproc.api.model_server import ModelServerSpec
from extproc.api.picker_config import reject_file_references
from extproc.api.quantities import Duration
from extproc.engines.metrics import MetricsReader
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.scheduling.engine_metrics_config import USUAL_NAMES, MetricsSource, scrape_config_of

SPEC = ModelServerSpec(model="m", metrics_port=9, metrics_path="/a", connection=EngineConnection(tls=EngineTls()))


def test_without_a_source_the_model_server_says_all() -> None:
    found = scrape_config_of(SPEC, None, USUAL_NAMES)
    assert (found.port, found.path, found.interval_s, found.connection) == (9, "/a", 0.2, SPEC.connection)


def test_what_a_source_says_goes_before() -> None:
    source = MetricsSource(scheme="http", path="/b", port=8, interval=Duration("1s"))
    found = scrape_config_of(SPEC, source, USUAL_NAMES)
    assert (found.port, found.path, found.interval_s, found.connection) == (8, "/b", 1.0, EngineConnection())


def test_a_server_that_is_never_read_stays_so() -> None:
    spec = ModelServerSpec(model="m", scrape_interval=Duration("0s"))
    assert scrape_config_of(spec, MetricsSource(interval=Duration("1s")), USUAL_NAMES).interval_s == 0


NAMES = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: core-metrics-extractor
    parameters:
      engineLabelKey: kind
      defaultEngine: mine
      engineConfigs:
        - {name: mine, queuedRequestsSpec: "depth{state=waiting}", runningRequestsSpec: active}
        - {name: vllm, kvUsageSpec: my_usage}
"""
PAGE = b"""# other
depth{state="waiting"} 5
depth{state="done"} 50
active 2
my_usage 0.75
vllm:num_requests_waiting 3
vllm:kv_cache_usage_perc 0.25
"""


@pytest.mark.parametrize(
    ("labels", "load"),
    [({}, (5, 2, None)), ({"kind": "unheard-of"}, (5, 2, None)), ({"kind": "vllm"}, (3, None, 0.75))],
)
def test_a_file_says_what_the_metrics_of_each_type_are_called(
    labels: dict[str, str], load: tuple[float | None, ...]
) -> None:
    names = picker_from_text("a.yaml", NAMES, BUILT_IN).picker.names
    report = MetricsReader(names.dialect_of(labels, SPEC)).read(PAGE).report
    assert (report.waiting, report.running, report.kv_usage) == load


def test_a_default_engine_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="there is no engine 'yours'"):
        picker_from_text("a.yaml", NAMES.replace("defaultEngine: mine", "defaultEngine: yours"), BUILT_IN)


def test_half_a_client_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="write both or neither"):
        MetricsSource(client_cert_path="a")


@pytest.mark.parametrize("field", ["caCertPath", "clientCertPath", "clientKeyPath"])
def test_an_object_of_a_cluster_may_not_name_files_of_the_gateway(field: str) -> None:
    text = NAMES + f"  - {{type: metrics-data-source, parameters: {{{field}: /etc/gateway/key.pem}}}}\n"
    with pytest.raises(ConfigInvalid, match=f"parameters.{field}: names a file of the gateway"):
        reject_file_references(read_picker_file("a.yaml", text))
    reject_file_references(read_picker_file("a.yaml", NAMES))
