# SPDX-License-Identifier: Apache-2.0
"""vLLM's command line starts the simulator: what the preset writes is kept, translated or dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.engine.__main__ import parser
from bench.engine.vllm_command_line import translate_arguments
from controller.api.model import ModelFormat
from controller.api.serving_runtime import EngineConfig, LoraLimits, Parallelism
from controller.models.runtimes.engine_settings import EngineSettings, build_command_line, engine_settings
from controller.models.runtimes.presets import built_in_presets

if TYPE_CHECKING:
    from argparse import Namespace


def test_what_the_preset_writes_starts_the_simulator() -> None:
    config = EngineConfig(parallelism=Parallelism(tensor=4), max_length=4096, kv_events=True, prompt_token_details=True)
    options = started(config)
    assert (options.model, options.port, options.max_model_len) == ("llama", [8000], 4096)
    assert (options.kv_events_port, options.kv_replay_port) == ([5557], [5657])


def test_an_engine_with_adapters_loads_them() -> None:
    options = started(EngineConfig(lora=LoraLimits(max_loaded=4, max_cached=8, max_rank=16)), adapters=True)
    assert options.enable_lora
    assert (options.max_loras, options.max_cpu_loras, options.max_lora_rank) == (4, 8, 16)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--model=meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("--model meta-llama/Llama-3.1-8B --port 9000", "meta-llama/Llama-3.1-8B"),
        ("serve meta-llama/Llama-3.1-8B --enable-lora", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("--model=/mnt/models --served-model-name=llama", "llama"),
        ("--served-model-name llama l2 --model /mnt/models", "llama"),
        ("--port=9000", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_an_engine_serves_under_the_name_that_vllm_would(line: str, name: str) -> None:
    assert parser().parse_args(translate_arguments(line.split())).model == name


def test_flags_in_two_words_are_those_in_one() -> None:
    words = "--model m --port 9000 --enable-lora --gpu-memory-utilization 0.9 --max-loras 4"
    options = parser().parse_args(translate_arguments(words.split()))
    assert (options.port, options.enable_lora, options.max_loras) == ([9000], True, 4)


def started(config: EngineConfig, *, adapters: bool = False) -> Namespace:
    """The simulator's options, of what the preset for vLLM makes of a backend's configuration."""
    engine = EngineSettings(
        served_name="llama",
        path="/mnt/models",
        format=ModelFormat(name="huggingface"),
        port=8000,
        config=config,
        has_adapters=adapters,
    )
    line = build_command_line(built_in_presets()["vllm"].spec.arguments, engine_settings(engine, "entry")).args
    return parser().parse_args(translate_arguments(line))


def test_an_engine_of_a_pair_has_the_side_channel_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.7")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700")
    config = '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
    options = parser().parse_args(translate_arguments(["--model=m", f"--kv-transfer-config={config}"]))
    assert options.kv_transfer_config[0].kv_role == "kv_producer"
    assert (options.side_channel_host, options.side_channel_port) == ("127.0.0.7", [5700])
    for connector, port, variable in (
        ("MooncakeConnector", 8998, "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
        ("OffloadingConnector", 5710, "VLLM_P2P_SIDE_CHANNEL_PORT"),
    ):
        given = ["--model=m", f"--kv-transfer-config={config.replace('NixlConnector', connector)}"]
        assert parser().parse_args(translate_arguments(given)).side_channel_port == [port]
        monkeypatch.setenv(variable, "7777")
        assert parser().parse_args(translate_arguments(given)).side_channel_port == [7777]
    # one that the simulator does not know is left out: the engine serves whole requests
    other = translate_arguments(["--model=m", '--kv-transfer-config={"kv_connector":"MultiConnector"}'])
    assert parser().parse_args(other).kv_transfer_config is None
