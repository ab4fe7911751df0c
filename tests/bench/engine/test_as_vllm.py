# SPDX-License-Identifier: Apache-2.0
"""vLLM's command line starts the simulator: what the preset writes is kept, translated or dropped."""

from __future__ import annotations

from bench.engine.__main__ import parser
from bench.engine.as_vllm import translated
from controller.resources.engine import EngineConfig, Parallelism
from controller.resources.model import ModelFormat
from controller.runtimes.arguments import words
from controller.runtimes.presets import built_in
from controller.runtimes.settings import Engine, settings_of


def test_what_the_preset_writes_starts_the_simulator() -> None:
    config = EngineConfig(parallelism=Parallelism(tensor=4), max_length=4096, kv_events=True, prompt_token_details=True)
    engine = Engine(
        served_name="llama", path="/mnt/models", format=ModelFormat(name="huggingface"), port=8000, config=config
    )
    line = words(built_in()["vllm"].spec.arguments, settings_of(engine, "entry")).args
    options = parser().parse_args(translated(line))
    assert (options.model, options.port, options.max_model_len) == ("llama", [8000], 4096)
    assert (options.kv_events_port, options.kv_replay_port) == ([5557], [5657])
