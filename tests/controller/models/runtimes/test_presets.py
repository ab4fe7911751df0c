# SPDX-License-Identifier: Apache-2.0
"""The built-in presets: the same as in manifests/runtimes, without mistakes, and what their rules make of settings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from controller.api.model import ModelFormat
from controller.api.serving_runtime import ConditionalArguments, Engine, EngineConfig, LoraLimits, Parallelism
from controller.models.model.workload_templates import TRANSFER_S
from controller.models.runtimes.engine_settings import (
    EngineSettings,
    build_command_line,
    engine_settings,
    unknown_settings,
)
from controller.models.runtimes.presets import built_in_objects, built_in_presets
from extproc.api.model_server import PdGroup
from extproc.engines.dialects import DIALECTS
from extproc.wire_names import LIVE_PATH

ROOT = Path(__file__).parents[4]
MANIFESTS = ROOT / "manifests" / "runtimes"


def engine(**fields: Any) -> EngineSettings:  # noqa: ANN401 - fields of Engine and of its config
    names = ("role", "connector", "has_adapters", "format", "protocol", "port", "grpc_port")
    own = {name: fields.pop(name) for name in names if name in fields}
    base = {"served_name": "llama", "path": "/mnt/models", "format": ModelFormat(name="huggingface"), "port": 8000}
    return EngineSettings(**{**base, **own, "config": EngineConfig(**fields)})


def args(preset: str, node: str = "entry", **fields: object) -> list[str]:
    settings = engine_settings(engine(**fields), node)  # type: ignore[arg-type]  # a literal
    return build_command_line(built_in_presets()[preset].spec.arguments, settings).args


def env(preset: str, **fields: object) -> dict[str, str]:
    found = build_command_line(
        built_in_presets()[preset].spec.arguments, engine_settings(engine(**fields), "entry")
    ).env
    return {one["name"]: one.get("value", "") for one in found}


def test_manifests_are_the_built_in_presets() -> None:
    files = {path.name: yaml.safe_load(path.read_text()) for path in MANIFESTS.glob("*.yaml")}
    kustomization = files.pop("kustomization.yaml")
    assert kustomization["resources"] == sorted(files)
    assert sorted(files.values(), key=str) == sorted(built_in_objects(), key=str), (
        "run python -m controller.models.runtimes"
    )


@pytest.mark.parametrize("name", sorted(built_in_presets()))
def test_a_preset_has_no_mistake(name: str) -> None:
    preset = built_in_presets()[name]
    assert preset.problem == ""
    assert list(unknown_settings(preset.spec.arguments)) == []
    assert [one["name"] for one in preset.spec.pod["containers"]] == ["engine"]


def test_every_family_of_engines_has_a_preset() -> None:
    assert {one.spec.engine for one in built_in_presets().values()} == set(get_args(Engine))


# Where a Model's requests come, on the one port that its engine's agent and the kubelet ask, too.
PORTS = {
    "sklearnserver": ("--http_port=8080", "--grpc_port=8081"),
    "xgbserver": ("--http_port=8080", "--grpc_port=8081"),
    "lgbserver": ("--http_port=8080", "--grpc_port=8081"),
    "pmmlserver": ("--http_port=8080", "--grpc_port=8081"),
    "paddleserver": ("--http_port=8080", "--grpc_port=8081"),
    "huggingfaceserver": ("--http_port=8080", "--grpc_port=8081"),
    "tensorflow-serving": ("--rest_api_port=8501", "--port=8500"),
}


@pytest.mark.parametrize("name", PORTS)
def test_a_model_server_gets_its_name_its_weights_and_its_ports(name: str) -> None:
    spec = built_in_presets()[name].spec
    given = args(name, port=spec.port, grpc_port=spec.grpc_port)
    flag = "--model_base_path" if name == "tensorflow-serving" else "--model_dir"
    assert given[:2] == ["--model_name=llama", f"{flag}=/mnt/models"]
    assert set(PORTS[name]) <= {*given}
    container = spec.pod["containers"][0]
    for probe in ("startupProbe", "livenessProbe"):
        (asked,) = (container[probe][one] for one in ("httpGet", "tcpSocket") if one in container[probe])
        assert asked["port"] == "http"
        assert asked.get("path", LIVE_PATH) == LIVE_PATH


@pytest.mark.parametrize("name", [*PORTS, "torchserve"])
def test_a_model_server_has_no_rights_as_in_kserve(name: str) -> None:
    given = built_in_presets()[name].spec.pod["containers"][0]["securityContext"]
    assert given["capabilities"] == {"drop": ["ALL"]}
    assert (given["runAsNonRoot"], given["allowPrivilegeEscalation"]) == (True, False)
    # a kubelet starts no image as another user that names its user by a word, or none
    assert given.get("runAsUser") == (1000 if name in {"tensorflow-serving", "torchserve"} else None)


def test_boosted_trees_have_one_thread_as_in_kserve() -> None:
    assert [name for name in built_in_presets() if "--nthread=1" in args(name)] == ["lgbserver", "xgbserver"]


def test_torchserve_has_the_form_of_the_protocol() -> None:
    forms = {one: env("torchserve", protocol=one) for one in ("V1", "V2")}
    assert {one: found["PROTOCOL_VERSION"] for one, found in forms.items()} == {"V1": "v1", "V2": "v2"}
    envelopes = {one: found["TS_SERVICE_ENVELOPE"] for one, found in forms.items()}
    assert envelopes == {"V1": "kserve", "V2": "kservev2"}
    assert args("torchserve") == [
        "torchserve",
        "--start",
        "--model-store=/mnt/models/model-store",
        "--ts-config=/mnt/models/config/config.properties",
    ]


def test_huggingfaceserver_spreads_what_generates_alone() -> None:
    spread = Parallelism(tensor=2)
    assert "--tensor-parallel-size=2" in args("huggingfaceserver", protocol="OpenAI", parallelism=spread)
    assert "--tensor-parallel-size=2" not in args("huggingfaceserver", protocol="V2", parallelism=spread)
    assert "--max_model_len=512" in args("huggingfaceserver", protocol="V2", max_length=512)


def test_tensorflow_serving_reads_from_a_file_where_its_metrics_are(tmp_path: Path) -> None:
    command, given = built_in_presets()["tensorflow-serving"].spec.config.command, args("tensorflow-serving")
    assert command is not None
    path = given[-1].removeprefix("--monitoring_config_file=")
    script = command[2].replace(path, str(tmp_path / "monitoring")).replace("exec tensorflow_model_server", "echo")
    words_ = [*command[:2], script, command[3], *given]
    ran = subprocess.run(words_, env=env("tensorflow-serving"), capture_output=True, text=True, check=True)
    assert ran.stdout.split() == given
    assert f'path: "{DIALECTS["TensorFlow"].metrics_path}"' in (tmp_path / "monitoring").read_text()


def test_vllm_as_it_comes() -> None:
    assert args("vllm") == ["--model=/mnt/models", "--served-model-name=llama", "--port=8000"]


def test_vllm_with_everything() -> None:
    found = args(
        "vllm",
        parallelism=Parallelism(tensor=4, pipeline=2, data=2, expert=True),
        max_length=8192,
        prefix_caching=False,
        prompt_token_details=True,
        has_adapters=True,
        lora=LoraLimits(max_loaded=2, max_cached=8, max_rank=16),
    )
    assert found[3:] == [
        "--tensor-parallel-size=4",
        "--pipeline-parallel-size=2",
        "--data-parallel-size=2",
        "--enable-expert-parallel",
        "--max-model-len=8192",
        "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-lora",
        "--max-loras=2",
        "--max-cpu-loras=8",
        "--max-lora-rank=16",
    ]


def test_limits_of_adapters_are_nothing_without_adapters() -> None:
    assert args("vllm", lora=LoraLimits(max_loaded=2)) == args("vllm")


def transfers(connector: str, role: str) -> dict[str, Any]:
    """The last word of vLLM's command line."""
    flag, _, value = args("vllm", connector=connector, role=role)[-1].partition("=")
    assert flag == "--kv-transfer-config"
    found: dict[str, Any] = json.loads(value)
    return found


@pytest.mark.parametrize(
    ("connector", "role", "name", "kv_role"),
    [
        ("NIXL", "prefill", "NixlConnector", "kv_producer"),
        ("NIXL", "decode", "NixlConnector", "kv_consumer"),
        # a store that both read and write
        ("LMCache", "prefill", "LMCacheConnectorV1", "kv_both"),
        ("LMCache", "decode", "LMCacheConnectorV1", "kv_both"),
        ("Mooncake", "prefill", "MooncakeConnector", "kv_producer"),
        ("Mooncake", "decode", "MooncakeConnector", "kv_consumer"),
    ],
)
def test_vllm_moves_kv_caches_and_computes_what_did_not_come(
    connector: str, role: str, name: str, kv_role: str
) -> None:
    found = transfers(connector, role)
    assert (found["kv_connector"], found["kv_role"]) == (name, kv_role)
    assert found["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_lease_of_vllm_is_that_of_a_model_server(role: str) -> None:
    lease_s = transfers("NIXL", role)["kv_connector_extra_config"]["kv_lease_duration"]
    assert lease_s == float(PdGroup(prefill_labels={}, decode_labels={}).lease)


def test_a_prefill_engine_that_stops_waits_for_who_fetches_from_it_and_its_pod_for_longer() -> None:
    assert f"--shutdown-timeout={TRANSFER_S}" in args("vllm", connector="NIXL", role="prefill")
    assert not any("--shutdown-timeout" in one for one in args("vllm", connector="NIXL", role="decode") + args("vllm"))


@pytest.mark.parametrize(
    ("connector", "role", "expected"),
    [
        ("NIXL", "prefill", {"VLLM_NIXL_SIDE_CHANNEL_HOST": "", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}),
        ("NIXL", "decode", {"VLLM_NIXL_SIDE_CHANNEL_HOST": "", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}),
        ("LMCache", "decode", {"PYTHONHASHSEED": "0"}),
        ("Mooncake", "prefill", {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"}),
        ("Mooncake", "decode", {}),
    ],
)
def test_vllm_finds_the_other_engine(connector: str, role: str, expected: dict[str, str]) -> None:
    assert env("vllm", connector=connector, role=role) == expected


def test_vllm_over_nodes() -> None:
    spread = {"nodes": 2, "parallelism": Parallelism(tensor=8, pipeline=2)}
    entry, worker = args("vllm", **spread), args("vllm", "worker", **spread)
    assert entry[-3:] == ["--nnodes=$(GROUP_SIZE)", "--node-rank=$(WORKER_INDEX)", "--master-addr=$(ENTRY_ADDRESS)"]
    assert worker == [*entry, "--headless"]


def test_sglang_prefill_over_nodes() -> None:
    found = args(
        "sglang", nodes=2, parallelism=Parallelism(tensor=16, expert=True), role="prefill", connector="Mooncake"
    )
    assert found[5:] == [
        "--tp-size=16",
        "--ep-size=16",
        "--disaggregation-mode=prefill",
        "--disaggregation-bootstrap-port=8998",
        "--disaggregation-transfer-backend=mooncake",
        "--nnodes=$(GROUP_SIZE)",
        "--node-rank=$(WORKER_INDEX)",
        "--dist-init-addr=$(ENTRY_ADDRESS):20000",
    ]


@pytest.mark.parametrize("connector", ["NIXL", "Mooncake"])
def test_only_sglangs_prefill_engine_has_a_port_for_the_other(connector: str) -> None:
    port = "--disaggregation-bootstrap-port=8998"
    prefill, decode = (args("sglang", role=role, connector=connector) for role in ("prefill", "decode"))
    assert prefill[-3:] == [
        "--disaggregation-mode=prefill",
        port,
        f"--disaggregation-transfer-backend={connector.lower()}",
    ]
    assert decode[-2:] == ["--disaggregation-mode=decode", prefill[-1]]


def test_tensorrt_llm_reads_what_a_role_needs_from_a_file(tmp_path: Path) -> None:
    written = {}
    command = built_in_presets()["tensorrt-llm"].spec.config.command
    assert command is not None
    *_, path = args("tensorrt-llm", role="prefill", connector="NIXL")[-1].partition("=")
    assert path in command[2]
    script = command[2].replace(path, str(tmp_path / "options.yaml")).replace("exec trtllm-serve", "echo")
    for role in ("prefill", "decode"):
        given = args("tensorrt-llm", role=role, connector="NIXL")
        ran = subprocess.run(
            [command[0], command[1], script, command[3], *given],
            env=env("tensorrt-llm", role=role, connector="NIXL"),
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.split() == ["serve", *given]
        assert given[-1] == f"--extra_llm_api_options={path}"
        written[role] = yaml.safe_load((tmp_path / "options.yaml").read_text())
    assert written["decode"] == {"cache_transceiver_config": {"backend": "NIXL"}}
    assert written["prefill"] == {**written["decode"], "disable_overlap_scheduler": True}


def test_tensorrt_llm_that_does_both_reads_no_file() -> None:
    assert env("tensorrt-llm") == {}
    assert not any("options.yaml" in one for one in args("tensorrt-llm"))


def test_mlserver_is_told_the_class_of_the_format() -> None:
    found = env("mlserver", format=ModelFormat(name="xgboost"))
    assert found["MLSERVER_MODEL_IMPLEMENTATION"] == "mlserver_xgboost.XGBoostModel"
    assert found["MLSERVER_HTTP_PORT"] == "8000"


def test_the_agent_reads_metrics_where_the_engine_serves_them() -> None:
    assert env("mlserver", format=ModelFormat(name="sklearn"))["MLSERVER_METRICS_PORT"] == str(
        DIALECTS["MLServer"].metrics_port
    )
    assert f"--metrics-port={DIALECTS['Triton'].metrics_port}" in args("triton")


def test_braces_of_json_and_of_kubernetes_are_left_alone() -> None:
    rules = (ConditionalArguments(args=('--x={"a":{"b":1}}', "--y=$(POD_IP)", "--z={name}-{name}")),)
    assert build_command_line(rules, {"name": "n"}).args == ['--x={"a":{"b":1}}', "--y=$(POD_IP)", "--z=n-n"]


def test_names_in_rules_that_are_no_settings_are_found() -> None:
    rules = (ConditionalArguments(when={"tensr": "*"}, args=("--x={modl}",)),)
    assert list(unknown_settings(rules)) == ["modl", "tensr"]
