# SPDX-License-Identifier: Apache-2.0
"""llm-d's flags: what they come to here, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from controller.commands.epp import FLAGS, FlagInvalid, Plan, for_conformance, plan, read_flags
from controller.gateway.compile.pools import server_of
from controller.gateway.compile.sources import source_of
from extproc.cli.serve import parser

ROOT = Path(__file__).parents[3]


def planned(*words: str, namespace: str = "team") -> Plan:
    return plan(read_flags(words), namespace=namespace, address="0.0.0.0", trusts_headers=True)  # noqa: S104 - not opened


# As llm-d-router's chart writes them, with its default values.
CHART = [
    *("--pool-name", "llama", "--pool-namespace", "team", "--pool-group", "inference.networking.k8s.io"),
    *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--grpc-health-port", "9003"),
    *("--tracing=false", "--metrics-endpoint-auth=false"),
]


def test_the_charts_command_line_runs_as_it_stands() -> None:
    found = planned(*CHART)
    assert found.pool == "team/llama"
    assert str(found.picker_file) == "/config/default-plugins.yaml"
    options = parser().parse_args(["--config", "x", *found.extproc])
    assert (options.listen, options.health, options.metrics) == ("0.0.0.0:9002", "0.0.0.0:9003", "0.0.0.0:9090")
    assert options.tls_self_signed
    assert options.wait_for_pool
    assert options.trust_headers
    assert options.pool == "team/llama"
    assert found.metrics == "0.0.0.0:9091"


def test_what_has_no_effect_is_told() -> None:
    notes = read_flags(["-v=5", "--zap-log-level", "debug", "--ha-enable-leader-election"]).notes
    assert [note.partition(" ")[0] for note in notes] == ["--v", "--zap-log-level", "--ha-enable-leader-election"]


def test_the_first_versions_spelling_is_read() -> None:
    assert planned("-poolName=llama", "-grpcPort", "9000").extproc[:2] == ("--pool", "team/llama")


@pytest.mark.parametrize(
    ("words", "namespace"),
    [([], "team"), (["--pool-namespace", "other"], "other"), (["--pool-namespace="], "team")],
)
def test_the_namespace_is_the_flags_or_our_own(words: list[str], namespace: str) -> None:
    assert planned("--pool-name", "llama", *words).pool == f"{namespace}/llama"
    assert planned("--pool-name", "llama", namespace="").pool == "default/llama"


def test_a_folder_of_certificates_takes_the_place_of_our_own() -> None:
    words = planned("--pool-name", "llama", "--cert-path", "/certs").extproc
    assert "--tls-self-signed" not in words
    assert words[words.index("--tls-cert") + 1] == "/certs/tls.crt"
    assert words[words.index("--tls-key") + 1] == "/certs/tls.key"
    assert not [word for word in planned("--pool-name", "llama", "--secure-serving=false").extproc if "tls" in word]


def test_pods_may_be_selected_without_a_pool() -> None:
    found = planned("--endpoint-selector", "app=llama,env==prod", "--endpoint-target-ports", "8000,8001,8000")
    assert found.fixed_pool is not None
    server = server_of(found.fixed_pool, prefix="").server
    assert server is not None
    assert server["spec"]["workloadSelector"] == {"matchLabels": {"app": "llama", "env": "prod"}}
    assert server["spec"]["workloadPort"] == {"port": 8000, "rankPorts": [8001]}


def test_names_of_metrics_say_which_engine_it_is() -> None:
    words = ["--pool-name", "llama", "--total-queued-requests-metric", "sglang:num_queue_reqs"]
    assert planned(*words).server_fields["engine"] == "SGLang"
    assert "engine" not in planned("--pool-name", "llama").server_fields


def test_tritons_names_are_those_of_tensorrt_llm_and_its_page_is_tritons() -> None:
    words = [
        "--pool-name",
        "llama",
        "--total-queued-requests-metric",
        "nv_trt_llm_request_metrics{request_type=waiting}",
    ]
    fields = planned(*words).server_fields
    assert (fields["engine"], fields["metricsPath"]) == ("TensorRT-LLM", "/metrics")
    assert planned(*words, "--model-server-metrics-path", "/m").server_fields["metricsPath"] == "/m"
    assert "metricsPath" not in planned(*words[:3], "trtllm_num_requests_waiting").server_fields


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "write --pool-name or --endpoint-selector"),
        (["--pool-name", "a", "--endpoint-selector", "a=b"], "write --pool-name or --endpoint-selector"),
        (["--pool-name"], "--pool-name needs a value"),
        (["--pool-name", "a", "--tracing", "false"], "'false' is no flag"),
        (["--pool-name", "a", "--no-such"], "there is no flag '--no-such'"),
        (["--pool-name", "a", "--tracing=maybe"], "write true or false"),
        (["--pool-name", "a", "--grpc-port", "x"], "write a number"),
        (["--pool-name", "a", "--config-file", "f", "--config-text", "t"], "write one of them"),
        (["--pool-name", "a", "--pool-group", "x.dev"], "--pool-group=x.dev: write"),
        (["--pool-name", "a", "--drain-timeout", "soon"], "write a duration"),
        (["--pool-name", "a", "--metrics-cert-dir", "/c"], "metrics have no TLS"),
        (["--pool-name", "a", "--disable-endpoint-subset-filter"], "the subset hint is always obeyed"),
        (["--pool-name", "a", "--model-server-metrics-port", "9999"], "each endpoint's own port"),
        (["--pool-name", "a", "--lora-info-metric", "x", "--total-queued-requests-metric", "my:queue"], "no engine"),
        (
            [
                *("--pool-name", "a", "--total-queued-requests-metric", "vllm:num_requests_waiting"),
                *("--total-running-requests-metric", "sglang:num_running_reqs"),
            ],
            "metrics of SGLang and vLLM",
        ),
        (["--endpoint-selector", "app in (a,b)", "--endpoint-target-ports", "1"], "there are no other operators"),
        (["--endpoint-selector", "app!=a", "--endpoint-target-ports", "1"], "there are no other operators"),
        (["--endpoint-selector", "app=a"], "write 1 to 8 ports"),
        (["--endpoint-selector", "app=a", "--endpoint-target-ports", "0"], "write 1 to 8 ports"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(FlagInvalid) as refused:
        planned(*words)
    assert said in str(refused.value)


def test_a_refused_flag_may_ask_for_nothing() -> None:
    for flag in FLAGS:
        if flag.harmless:
            read_flags([f"--{flag.name}={flag.harmless}"])


def test_for_the_conformance_suite_extproc_obeys_a_header_and_reads_no_plugins() -> None:
    found = for_conformance(planned(*CHART))
    assert found.picker_file is None
    assert parser().parse_args(["--config", "x", *found.extproc]).conformance


def test_the_annotation_on_the_page_about_moving_is_valid() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    (text,) = re.findall(r"```yaml\n(metadata:\n.*?)```", page, re.DOTALL)
    spec = {"selector": {"matchLabels": {"app": "llama"}}, "targetPorts": [{"number": 8000}]}
    metadata = {"name": "llama", "namespace": "team", **yaml.safe_load(text)["metadata"]}
    found = server_of({"metadata": metadata, "spec": spec}, prefix="")
    assert found.server is not None, found.complaint
    assert source_of(found.server).complaint() == ""


def test_every_pool_among_the_manifests_can_be_served() -> None:
    (pool,) = yaml.safe_load_all((ROOT / "manifests" / "picker" / "base" / "pool.yaml").read_text())
    found = server_of({**pool, "metadata": {**pool["metadata"], "namespace": "team"}}, prefix="")
    assert found.server is not None, found.complaint
    assert source_of(found.server).complaint() == ""
