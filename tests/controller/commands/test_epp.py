# SPDX-License-Identifier: Apache-2.0
"""llm-d's flags: what they come to here, and what is refused."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import re
import ssl
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from controller.commands.epp import EppPlan, LaunchContext, conformance_plan, main, plan_launch
from controller.commands.llm_d_picker_flags import _SUITES, _SUITES_OF_TLS_13, FLAGS, FlagInvalid, read_flags
from controller.gateway.compile.inference_pools import server_from_pool
from controller.gateway.compile.source_objects import decode_source
from extproc.api.picker_config import accept_any_plugins
from extproc.cli.serve import parser
from extproc.metrics.request_metrics import TlsMetrics
from extproc.streams.tls import ReloadingCertificate, TlsRequirements

ROOT = Path(__file__).parents[3]


def planned(*words: str, namespace: str = "team", has_cluster: bool = True) -> EppPlan:
    context = LaunchContext(namespace=namespace, address="0.0.0.0", has_cluster=has_cluster)  # noqa: S104 - not opened
    return plan_launch(read_flags(words), context)


# As llm-d-router's chart writes them, with its default values.
CHART = [
    *("--pool-name", "llama", "--pool-namespace", "team", "--pool-group", "inference.networking.k8s.io"),
    *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--grpc-health-port", "9003"),
    *("--tracing=false", "--metrics-endpoint-auth=false"),
]


# As llm-d-router's chart sets them with router.tracing.enabled.
TRACING = {
    "OTEL_SERVICE_NAME": "llm-d-router/epp",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel-collector.monitoring.svc.cluster.local:4317",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_RESOURCE_ATTRIBUTES": "k8s.namespace.name=team,k8s.pod.name=epp-1",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.1",
}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("flags", "variables", "url"),
    [
        (["--tracing=true"], TRACING, "grpc://otel-collector.monitoring.svc.cluster.local:4317"),
        # llm-d traces without the flag, too
        ([], TRACING, "grpc://otel-collector.monitoring.svc.cluster.local:4317"),
        (["--tracing=false"], TRACING, None),
        ([], {}, None),
        ([], {"OTEL_TRACES_EXPORTER": "console", ENDPOINT: "http://otel:4317"}, None),
        ([], {"OTEL_TRACES_EXPORTER": "otlp"}, "grpc://localhost:4317"),
        ([], {ENDPOINT: "https://otel:4317/"}, "grpcs://otel:4317"),
        ([], {ENDPOINT: "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"}, "grpc://b:2"),
        ([], {ENDPOINT: "otel:4317", "OTEL_EXPORTER_OTLP_INSECURE": "TRUE"}, "grpc://otel:4317"),
        ([], {ENDPOINT: "otel:4317"}, "grpcs://otel:4317"),
        # as in llm-d, requests are served without traces
        ([], {ENDPOINT: "http://otel"}, None),
        ([], {ENDPOINT: "ftp://otel:1"}, None),
    ],
)
def test_spans_go_where_opentelemetrys_variables_say(
    flags: list[str], variables: dict[str, str], url: str | None
) -> None:
    context = LaunchContext(namespace="team", address="127.0.0.1", variables=variables)
    found = plan_launch(read_flags(["--pool-name=llama", *flags]), context)
    assert parser().parse_args(["--config", "x", *found.extproc]).otlp == url


def test_variables_of_tracing_without_effect_are_reported() -> None:
    def notes(*flags: str, **variables: str) -> list[str]:
        context = LaunchContext(namespace="team", address="127.0.0.1", variables=variables)
        return [
            note.partition(":")[0] for note in plan_launch(read_flags(["--pool-name=llama", *flags]), context).notes
        ]

    assert notes(**TRACING) == ["OTEL_TRACES_SAMPLER has no effect"]
    assert notes(**TRACING, OTEL_EXPORTER_OTLP_HEADERS="a=b")[0] == "OTEL_EXPORTER_OTLP_HEADERS has no effect"
    assert notes(OTEL_EXPORTER_OTLP_ENDPOINT="http://otel") == ["no spans are sent"]
    assert notes("--tracing", OTEL_TRACES_EXPORTER="console") == ["no spans are sent"]
    assert notes("--tracing=false", **TRACING) == notes() == []


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


@pytest.mark.parametrize(
    ("words", "has_cluster", "guarded"),
    [
        ([], True, "0.0.0.0:9090"),
        (["--metrics-endpoint-auth", "--metrics-port=9190"], True, "0.0.0.0:9190"),
        (["--metrics-endpoint-auth=false"], True, ""),
        ([], False, ""),
        (["--metrics-endpoint-auth=false"], False, ""),
    ],
)
def test_extproc_serves_its_metrics_itself_only_where_they_are_for_all(
    words: list[str], has_cluster: bool, guarded: str
) -> None:
    found = planned("--pool-name", "llama", *words, has_cluster=has_cluster)
    assert found.guarded_pages == guarded
    assert ("--metrics" in found.extproc) == (not guarded)


def test_without_a_cluster_that_could_check_tokens_metrics_cannot_be_guarded() -> None:
    with pytest.raises(FlagInvalid, match="without a cluster nobody can check tokens"):
        planned("--metrics-endpoint-auth", has_cluster=False)


def test_names_of_files_are_relative_to_the_file_of_the_operator(tmp_path: Path) -> None:
    def files(*words: str) -> str:
        options = parser().parse_args(["--config", "x", *planned("--pool-name", "llama", *words).extproc])
        return str(options.files)

    assert files("--config-file", str(tmp_path / "epp.yaml")) == str(tmp_path)
    assert files("--config-file", "a/epp.yaml") == str(Path.cwd() / "a")
    assert files() == files("--config-text", "{}") == str(Path.cwd())


def test_an_address_of_ipv6_is_listened_on() -> None:
    context = LaunchContext(namespace="team", address="::1")
    found = plan_launch(read_flags(["--pool-name", "llama"]), context)
    options = parser().parse_args(["--config", "x", *found.extproc])
    assert (options.listen, found.guarded_pages, found.metrics) == ("[::1]:9002", "[::1]:9090", "[::1]:9091")


def test_what_has_no_effect_is_told() -> None:
    notes = read_flags(["-v=5", "--zap-log-level", "debug", "--ha-enable-leader-election"]).notes
    assert [note.partition(" ")[0] for note in notes] == ["--v", "--zap-log-level", "--ha-enable-leader-election"]
    # who relied on a leader that knows every request has to know
    assert "by --redis" in notes[-1]


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


async def handshake(*words: str, version: ssl.TLSVersion) -> tuple[str, str, str] | None:
    """Suite and version that a client of ``version`` and the picker of these flags agree on, and the protocol in them;
    None if on nothing.
    """
    options = parser().parse_args(["--config", "x", *planned("--pool-name", "llama", *words).extproc])
    limits = TlsRequirements(options.tls_min_version, options.tls_ciphers)
    followed = ReloadingCertificate(None, TlsMetrics(CollectorRegistry()), lambda: dt.datetime.now(dt.UTC), limits)

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.minimum_version = client.maximum_version = version
    client.set_ciphers("ALL")
    client.set_alpn_protocols(["h2"])
    async with await asyncio.start_server(end, "127.0.0.1", 0, ssl=followed.context) as server:
        host, port = server.sockets[0].getsockname()
        try:
            _, writer = await asyncio.open_connection(host, port, ssl=client)
        except (ssl.SSLError, ConnectionError):
            return None
        suite, protocol, _ = writer.get_extra_info("cipher")
        used = (
            writer.get_extra_info("ssl_object").version(),
            writer.get_extra_info("ssl_object").selected_alpn_protocol(),
        )
        writer.close()
        assert protocol
        return suite, *used


@pytest.mark.parametrize(("name", "suite"), _SUITES.items())
async def test_each_suite_of_tls_12_can_be_chosen_alone(name: str, suite: str) -> None:
    found = await handshake(f"--tls-cipher-suites={name}", version=ssl.TLSVersion.TLSv1_2)
    assert found == (suite, "TLSv1.2", "h2")


async def test_names_of_tls_13_alone_leave_nothing_of_tls_12_as_in_go() -> None:
    words = f"--tls-cipher-suites={','.join(sorted(_SUITES_OF_TLS_13))}"
    assert await handshake(words, version=ssl.TLSVersion.TLSv1_2) is None
    found = await handshake(words, version=ssl.TLSVersion.TLSv1_3)
    assert found is not None
    assert found[1:] == ("TLSv1.3", "h2")
    both = await handshake(f"{words},TLS_RSA_WITH_AES_128_GCM_SHA256", version=ssl.TLSVersion.TLSv1_2)
    assert both == ("AES128-GCM-SHA256", "TLSv1.2", "h2")


@pytest.mark.parametrize("version", ["VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"])
async def test_no_version_of_tls_is_older_than_the_oldest_that_is_asked_for(version: str) -> None:
    words = f"--tls-min-version={version}"
    has_tls_12 = await handshake(words, version=ssl.TLSVersion.TLSv1_2) is not None
    assert has_tls_12 == (version != "VersionTLS13")
    assert await handshake(words, version=ssl.TLSVersion.TLSv1_3) is not None
    told = [note for note in read_flags([words]).notes if "TLS 1.2 is the oldest" in note]
    assert bool(told) == (version in {"VersionTLS10", "VersionTLS11"})


def test_pods_may_be_selected_without_a_pool() -> None:
    found = planned("--endpoint-selector", "app=llama,env==prod", "--endpoint-target-ports", "8000,8001,8000")
    assert found.fixed_pool is not None
    server = server_from_pool(found.fixed_pool, prefix="").server
    assert server is not None
    assert server["spec"]["workloadSelector"] == {"matchLabels": {"app": "llama", "env": "prod"}}
    assert server["spec"]["workloadPort"] == {"port": 8000, "rankPorts": [8001]}


@pytest.mark.parametrize(
    ("words", "pool"),
    [([], "team/epp"), (["--pool-name", "Slurm_job 42"], "team/slurm-job-42"), (["--pool-name=__"], "team/epp")],
)
def test_without_a_cluster_the_pools_name_is_any_text(words: list[str], pool: str) -> None:
    assert planned(*words, has_cluster=False).pool == pool


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


def test_the_page_of_metrics_may_be_elsewhere_and_behind_tls() -> None:
    words = ["--pool-name", "llama", "--model-server-metrics-port", "9999", "--model-server-metrics-scheme=https"]
    fields = planned(*words).server_fields
    assert fields["metricsPort"] == 9999
    assert fields["connection"] == {"tls": {"insecureSkipVerify": True}}
    assert not {"metricsPort", "connection"} & planned("--pool-name", "llama").server_fields.keys()


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
        (["--pool-name", "a", "--grpc-port=--5"], "write a number"),
        (["--pool-name", "a", "--grpc-port", "0"], "--grpc-port=0: write a port from 1 to 65535"),
        (["--pool-name", "a", "--metrics-port", "65535"], "write a port from 1 to 65534"),
        (["--pool-name", "a", "--model-server-metrics-port", "-1"], "write a port from 1 to 65535"),
        (["--pool-name", "a/b"], "--pool-name=a/b is not a name"),
        (["--pool-name", "a", "--pool-namespace", "x/y"], "--pool-namespace=x/y is not a namespace"),
        (["--pool-name", "a", "--config-file", "f", "--config-text", "t"], "write one of them"),
        (["--pool-name", "a", "--pool-group", "x.dev"], "--pool-group=x.dev: write"),
        (["--pool-name", "a", "--drain-timeout", "soon"], "write a duration"),
        (["--pool-name", "a", "--metrics-cert-dir", "/c"], "metrics have no TLS"),
        (["--pool-name", "a", "--disable-endpoint-subset-filter"], "the subset hint is always obeyed"),
        (["--pool-name", "a", "--model-server-metrics-scheme", "ftp"], "write http or https"),
        (
            [
                *("--pool-name", "a", "--model-server-metrics-scheme", "https"),
                "--model-server-metrics-https-insecure-skip-verify=false",
            ],
            "caCertPath",
        ),
        (["--pool-name", "a", "--engine-label-key", "engine"], "write engineLabelKey"),
        (["--pool-name", "a", "--tls-cipher-suites", "TLS_NONE"], "there is no 'TLS_NONE'; write some of TLS_ECDHE_"),
        (["--pool-name", "a", "--tls-cipher-suites", "TLS_RSA_WITH_RC4_128_SHA"], "is broken, and OpenSSL"),
        (["--pool-name", "a", "--tls-cipher-suites", "TLS_RSA_WITH_3DES_EDE_CBC_SHA"], "is broken, and OpenSSL"),
        (
            ["--pool-name", "a", "--tls-min-version", "VersionTLS14"],
            "write one of VersionTLS10, VersionTLS11, VersionTLS12, VersionTLS13",
        ),
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
    found = conformance_plan(planned(*CHART))
    assert found.picker_file is None
    assert parser().parse_args(["--config", "x", *found.extproc]).conformance


def test_the_annotation_on_the_page_about_moving_is_valid() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    (text,) = re.findall(r"```yaml\n(apiVersion: inference\S+\nkind: InferencePool\n[^`]*)```", page)
    spec = {"selector": {"matchLabels": {"app": "llama"}}, "targetPorts": [{"number": 8000}]}
    metadata = {"name": "llama", "namespace": "team", **yaml.safe_load(text)["metadata"]}
    found = server_from_pool({"metadata": metadata, "spec": spec}, prefix="")
    assert found.server is not None, found.complaint
    assert decode_source(found.server).mistakes_text() == ""


def test_every_pool_among_the_manifests_can_be_served() -> None:
    (pool,) = yaml.safe_load_all((ROOT / "manifests" / "picker" / "base" / "pool.yaml").read_text())
    found = server_from_pool({**pool, "metadata": {**pool["metadata"], "namespace": "team"}}, prefix="")
    assert found.server is not None, found.complaint
    assert decode_source(found.server).mistakes_text() == ""


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("{}", "'address' is missing or wrong"),
        ("{address: 'h'}", "write HOST:PORT"),
        ("{address: 'h:x'}", "write HOST:PORT"),
        ("{address: 'h:99999'}", "write HOST:PORT"),
        ("{address: 'u@h:1'}", "write HOST:PORT"),
        ("{address: 'h:1?db=2'}", "write HOST:PORT"),
        ("{address: ['h:1']}", "write HOST:PORT"),
        ("{address: 'h:1', db: -1}", "'db' is no number"),
        ("{address: 'h:1', db: x}", "'db' is no number"),
        ("{address: 'h:1', passwordEnv: NO_SUCH_VARIABLE}", "the variable NO_SUCH_VARIABLE is not set"),
        ("{address: 'h:1', passwordFile: pipe}", "is not a regular file"),
        ("{address: 'h:1', passwordFile: .}", "is not a regular file"),
        ('{address: "h:1", passwordFile: "a\\0b"}', "null byte"),
    ],
)
def test_a_redis_syncer_that_cannot_be_is_told(
    parameters: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    text = f"""apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{{type: redis-syncer, parameters: {parameters}}}, {{type: random-picker}}]
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: random-picker}}]}}]
"""
    assert main(["--pool-name=llama", f"--config-text={text}"], "epp", accept_any_plugins) == 2
    assert said in capsys.readouterr().err
