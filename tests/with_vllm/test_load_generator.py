# SPDX-License-Identifier: Apache-2.0
"""A load generator that people already use, vLLM's own, against the stack of ``make up``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from tests.with_vllm.model import write_model

SCRIPT = Path(__file__).parent / "vllm_bench.py"
PREFIXES = [
    "--dataset-name",
    "prefix_repetition",
    "--prefix-repetition-prefix-len",
    "2000",
    "--prefix-repetition-suffix-len",
    "100",
    "--prefix-repetition-num-prefixes",
    "4",
    "--prefix-repetition-output-len",
    "12",
    "--num-prompts",
    "60",
    "--request-rate",
    "20",
]


def rows(count: int) -> str:
    """Mooncake's format: every second row begins as the first does."""
    return "\n".join(
        json.dumps(
            {
                "timestamp": 100 * number,
                "input_length": 1024,
                "output_length": 8,
                "hash_ids": [0 if number % 2 else 2 * number + 1, 2 * number + 2],
            }
        )
        for number in range(count)
    )


@pytest.mark.parametrize("data", ["repeated prefixes", "a trace"])
async def test_vllms_load_generator_is_served_and_measures(data: str, vllm_python: str, tmp_path: Path) -> None:
    tokenizer, out, trace = tmp_path / "tokenizer", tmp_path / "out.json", tmp_path / "moon.jsonl"
    write_model(tokenizer)
    trace.write_text(rows(40))
    timed = ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--timed-trace-chunk-hash-size", "512"]
    timed += ["--timed-trace-sec-multiplier", "0.001", "--self-timed", "--num-prompts", "40"]
    flags, count = (PREFIXES, 60) if data == "repeated prefixes" else (timed, 40)
    async with running_stack(tmp_path, EngineFlags(count=3)) as stack:
        command = [vllm_python, str(SCRIPT), "bench", "serve", "--backend", "openai", "--base-url", stack.url]
        command += ["--endpoint", "/v1/completions", "--model", ALIAS, "--tokenizer", str(tokenizer), "--ignore-eos"]
        command += [
            "--goodput",
            "ttft:2000",
            "tpot:200",
            "--save-result",
            "--save-detailed",
            "--result-filename",
            str(out),
            *flags,
        ]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
        }
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, said.decode()[-3000:]
    found = json.loads(out.read_text())
    assert found["completed"] == count, str(found.get("errors"))[:600]
    assert 0 < found["mean_ttft_ms"] < 2000
    assert 0 < found["mean_tpot_ms"] < 200
