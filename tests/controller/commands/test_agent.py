# SPDX-License-Identifier: Apache-2.0
"""``attache agent``: its options, and what it says of mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from controller.agents.runtime.settings import parse_settings
from controller.commands.agent import main, parser
from tests.controller.agents.runtime.doubles import free_port

if TYPE_CHECKING:
    from controller.agents.runtime.settings import AgentSettings


def settings(*words: str) -> AgentSettings:
    return parse_settings(parser().parse_args(list(words)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "127.0.0.1:8000"], "no URL"),
        (["--engine", "ftp://127.0.0.1"], "no URL"),
        (["--listen", "9000"], "is not an address"),
        (["--listen", "agent.example:9000"], "is not an address"),
        (["--listen", "0.0.0.0:99999"], "is not an address"),
        (["--dialect", "vllm"], "invalid choice"),
        (["--dialect", "TensorFlow"], "needs --model"),
        (["--max-adapters", "-1"], "0 or more"),
        (["--probe-failures", "0"], "above 0"),
        (["--probe-timeout", "0"], "above 0"),
        (["--drain-timeout", "nan"], "number of seconds"),
        (["--drain-timeout", "10m"], "invalid"),
        (["--warm-up-tokens", "16,x"], "numbers of tokens"),
        (["--warm-up-prompts", "/nonexistent"], "/nonexistent"),
        (["--allow-uri", ""], "--allow-uri"),
    ],
)
def test_mistakes_are_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words, "attache agent")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_metrics_are_where_engines_of_a_kind_have_them() -> None:
    engine = ("--engine", "http://127.0.0.1:8000/", "--dialect")
    assert settings(*engine, "vLLM").metrics_url == "http://127.0.0.1:8000/metrics"
    assert settings(*engine, "TensorRT-LLM").metrics_url == "http://127.0.0.1:8000/prometheus/metrics"
    assert settings(*engine, "Triton").metrics_url == "http://127.0.0.1:8002/metrics"
    assert settings(*engine, "KServe").metrics_url == "http://127.0.0.1:8000/metrics"
    found = settings(*engine, "TensorFlow", "--model", "plus")
    assert found.metrics_url == "http://127.0.0.1:8000/monitoring/prometheus/metrics"
    assert settings("--engine", "http://[::1]:8000", "--dialect", "MLServer").metrics_url == "http://[::1]:8082/metrics"
    assert settings("--engine-metrics", "http://127.0.0.1:1/m").metrics_url == "http://127.0.0.1:1/m"


def test_local_adapters_may_be_in_the_cache_by_default() -> None:
    assert settings("--weights-cache", "/cache").adapters.policy.directories == (Path("/cache"),)
    found = settings("--weights-cache", "/cache", "--allow-path", "/mnt/models").adapters
    assert found.policy.directories == (Path("/mnt/models"),)
    assert found.links == Path("/cache/adapters")


def test_a_request_that_proves_that_the_model_answers(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text('{"path": "/v2/models/m/infer", "body": {"inputs": []}, "proof": "outputs"}')
    probe = settings("--probe-request", str(file)).probe
    assert probe is not None
    assert probe.path == "/v2/models/m/infer"
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"probe\.json"):
        settings("--probe-request", str(file))


def test_a_drain_without_an_agent_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--agent", f"http://127.0.0.1:{free_port()}"], "attache agent") == 1
    assert "does not answer" in capsys.readouterr().err
