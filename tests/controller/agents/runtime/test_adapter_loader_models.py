# SPDX-License-Identifier: Apache-2.0
"""Many models of a V2 server: their directories, the memory that they share, and what becomes of unused ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from controller.agents.runtime import adapter_loader
from controller.agents.runtime.adapter_loader import (
    AdapterAction,
    EngineAdapterState,
    LoadedAdapter,
    WantedAdapters,
    adapter_changes,
    idle_declared_adapters,
    next_adapter_action,
)
from controller.agents.runtime.agent import EngineAgent
from controller.agents.runtime.declared_adapters import (
    AdapterNameInvalid,
    DeclaredAdapter,
    SourcePolicy,
    parse_declared_adapters,
)
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.engine_client import EngineClient
from controller.agents.runtime.model_repository import add_model, remove_model
from controller.agents.runtime.server import AgentServer, serve_agent
from controller.agents.runtime.settings import AdapterSettings, AgentSettings
from controller.models.runtimes.engine_settings import build_command_line
from controller.models.runtimes.presets import built_in_presets
from extproc.engines.dialects import DIALECTS
from tests.controller.agents.runtime.doubles import FakeDownloads, free_port
from tests.controller.agents.runtime.test_model_repository import Repository, running_repository
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

MLSERVER, TRITON = DIALECTS["MLServer"], DIALECTS["Triton"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """An artefact."""
    made = tmp_path / "files"
    made.mkdir()
    (made / "model.joblib").write_bytes(b"1")
    return made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def settings(repository: Path, name: str) -> dict[str, Any]:
    return msgspec.json.decode((repository / name / "model-settings.json").read_bytes(), type=dict[str, Any])


def test_mlserver_gets_settings_with_the_declared_name_and_the_class_of_the_format(
    files: Path, repository: Path
) -> None:
    add_model(repository, "iris", files, dialect=MLSERVER, weights_format="sklearn")
    assert settings(repository, "iris") == {
        "name": "iris",
        "implementation": "mlserver_sklearn.SKLearnModel",
        "parameters": {"uri": str(files)},
    }
    remove_model(repository, "iris")
    assert list(repository.iterdir()) == []
    assert (files / "model.joblib").exists()


@pytest.mark.parametrize("uri", ["/etc/passwd", "../other", "s3://elsewhere", 7, None])
def test_an_artefact_has_neither_the_name_nor_the_files_of_another_model(
    files: Path, repository: Path, uri: object
) -> None:
    own = {"name": "victim", "implementation": "own.Model", "parameters": {"uri": uri, "version": "3"}, "platform": "p"}
    (files / "model-settings.json").write_text(json.dumps(own))
    (files / "own.py").write_text("")
    # nested settings would be found, too
    (files / "inner").mkdir()
    (files / "inner" / "model-settings.json").write_text(json.dumps({"name": "victim"}))
    add_model(repository, "iris", files, dialect=MLSERVER, weights_format="")
    assert settings(repository, "iris") == {
        "name": "iris",
        "implementation": "own.Model",
        "parameters": {"uri": str(files), "version": "3"},
        "platform": "p",
    }
    # its module can be imported
    assert (repository / "iris" / "own.py").exists()
    assert [path.parent.name for path in repository.rglob("model-settings.json")] == ["iris"]


def test_a_file_within_the_artefact_is_found_there(files: Path, repository: Path) -> None:
    own = {"implementation": "own.Model", "parameters": {"uri": "./model.joblib"}}
    (files / "model-settings.json").write_text(json.dumps(own))
    add_model(repository, "iris", files, dialect=MLSERVER, weights_format="")
    assert settings(repository, "iris")["parameters"]["uri"] == str(files / "model.joblib")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"', "[" * 100_000, "\xff"])
def test_settings_that_cannot_be_read_are_told(files: Path, repository: Path, text: str) -> None:
    (files / "model-settings.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(AdapterNameInvalid, match=r"model-settings\.json of the artefact cannot be read"):
        add_model(repository, "iris", files, dialect=MLSERVER, weights_format="sklearn")
    assert not repository.exists()


@pytest.mark.parametrize(("weights_format", "words"), [("", "its format is missing"), ("novel", "'novel' is unknown")])
def test_without_a_known_format_it_is_told_what_to_write(
    files: Path, repository: Path, weights_format: str, words: str
) -> None:
    with pytest.raises(
        AdapterNameInvalid, match=f"{words}; write one of huggingface, lightgbm, mlflow, sklearn, xgboost"
    ):
        add_model(repository, "iris", files, dialect=MLSERVER, weights_format=weights_format)


def test_formats_are_those_of_the_preset() -> None:
    rules = built_in_presets()["mlserver"].spec.arguments
    for name, implementation in MLSERVER.implementations.items():
        env = {
            one["name"]: one["value"]
            for one in build_command_line(rules, {"name": "x", "model": "/m", "format": name}).env
        }
        assert env["MLSERVER_MODEL_IMPLEMENTATION"] == implementation


def test_triton_gets_versions(files: Path, repository: Path) -> None:
    add_model(repository, "plain", files, dialect=TRITON, weights_format="onnx")
    assert (repository / "plain" / "1" / "model.joblib").exists()
    (files / "config.pbtxt").write_text("")
    add_model(repository, "configured", files, dialect=TRITON, weights_format="onnx")
    assert (repository / "configured" / "config.pbtxt").exists()
    single = files / "net.onnx"
    single.write_bytes(b"1")
    add_model(repository, "single", single, dialect=TRITON, weights_format="onnx")
    assert (repository / "single" / "1" / "model.onnx").read_bytes() == b"1"
    (files / "2").mkdir()
    add_model(repository, "versions", files, dialect=TRITON, weights_format="onnx")
    assert (repository / "versions").resolve() == files
    # another version of it takes its place
    add_model(repository, "versions", single, dialect=TRITON, weights_format="onnx")
    assert (repository / "versions" / "1" / "model.onnx").exists()


def test_what_is_in_the_repository_already_is_neither_changed_nor_removed(files: Path, repository: Path) -> None:
    (repository / "iris").mkdir(parents=True)
    add_model(repository, "iris", files, dialect=MLSERVER, weights_format="sklearn")
    remove_model(repository, "iris")
    assert list((repository / "iris").iterdir()) == []


def test_the_file_has_memory_and_format_and_a_mistake_costs_no_other_model() -> None:
    policy = SourcePolicy()
    content = json.dumps(
        {
            "iris": {"uri": "s3://m/iris", "memory": 5, "format": "sklearn"},
            "a/b": {"uri": "s3://m/b"},
            "a\n": {"uri": "s3://m/b"},
            "..": {"uri": "s3://m/b"},
            "minus": {"uri": "s3://m/b", "memory": -1},
        }
    )
    found, wrong = parse_declared_adapters(content.encode(), policy, is_directory=True)
    assert found == {"iris": DeclaredAdapter("s3://m/iris", memory=5, format="sklearn")}
    assert wrong.keys() == {"a/b", "a\n", "..", "minus"}


def shelf(sizes: Mapping[str, int], *held: LoadedAdapter, pinned: str = "") -> EngineAdapterState:
    return EngineAdapterState({one.name: one for one in held}, frozenset(pinned), memory=10, sizes=sizes, reloads=True)


def step(held: EngineAdapterState, name: str, path: str = "") -> AdapterAction:
    return next_adapter_action(held, name, path, keep_s=10.0, now_s=100.0)


def test_models_go_until_there_is_memory_and_none_goes_in_vain() -> None:
    sizes = {"a": 4, "b": 4, "c": 2, "x": 9}
    a, b, c = (LoadedAdapter(name, used_at_s=at_s) for name, at_s in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    assert step(shelf(sizes, a, b), "c") == AdapterAction("load", "c")
    assert step(shelf(sizes, a, b, c), "x") == AdapterAction("unload", "a", "evicted")
    assert step(shelf(sizes, b, c), "x") == AdapterAction("unload", "b", "evicted")
    assert step(shelf(sizes, c), "x") == AdapterAction("unload", "c", "evicted")
    # with c pinned, x finds no memory whatever goes
    assert step(shelf(sizes, a, b, c, pinned="c"), "x").kind == "busy"


def test_other_files_take_the_place_of_a_model_without_a_gap() -> None:
    held = LoadedAdapter("a", "/old", used_at_s=99.0, is_in_use=True)
    assert step(shelf({"a": 4}, held), "a", "/new") == AdapterAction("load", "a")
    assert step(shelf({"a": 4}, held), "a", "/old") == AdapterAction("loaded", "a")


@pytest.mark.parametrize(("size", "load"), [(5, ("p", "a")), (6, ("p",))])
def test_models_of_the_file_are_loaded_ahead_if_all_of_them_fit(size: int, load: tuple[str, ...]) -> None:
    declared = {"a": DeclaredAdapter("u", memory=size), "p": DeclaredAdapter("u", pinned=True, memory=5)}
    held = shelf({name: one.memory for name, one in declared.items()}, pinned="p")
    assert adapter_changes(held, WantedAdapters(declared, {}), keep_s=0.0, now_s=1.0).load == load


def test_what_is_unused_is_what_nobody_pinned_or_used() -> None:
    old, new, busy = (
        LoadedAdapter("old", used_at_s=1.0),
        LoadedAdapter("new", used_at_s=95.0),
        LoadedAdapter("busy", is_in_use=True),
    )
    held = shelf({}, old, new, busy, LoadedAdapter("kept"), LoadedAdapter("strange"), pinned="kept")
    held = msgspec.structs.replace(held, pinned=frozenset({"kept"}))
    assert idle_declared_adapters(held, ["old", "new", "busy", "kept", "gone"], 10.0, 100.0) == ["old"]


class Running:
    """A server with its agent. ``file``: of the declared models."""

    def __init__(self, server: Repository, http: httpx.AsyncClient, file: Path, downloads: FakeDownloads) -> None:
        self.server, self.http, self.file, self.downloads = server, http, file, downloads

    def declare(self, **models: dict[str, Any]) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({name: {"uri": f"s3://m/{name}", **one} for name, one in models.items()}))
        new.replace(self.file)

    async def load(self, name: str) -> httpx.Response:
        return await self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": f"s3://m/{name}"})

    async def states(self) -> dict[str, str]:
        listed = (await self.http.get("/v1/adapters")).json()["data"]
        return {one["id"]: one["state"] for one in listed}

    async def message(self, name: str) -> str:
        listed = (await self.http.get("/v1/adapters")).json()["data"]
        return next((one["message"] for one in listed if one["id"] == name), "")


@contextlib.asynccontextmanager
async def running(tmp_path: Path, *, memory: int = 10, idle_unload_s: float = 0.0) -> AsyncIterator[Running]:
    (tmp_path / "models").mkdir()
    server, file = Repository(tmp_path / "models"), tmp_path / "models.json"
    file.write_text("{}")
    url = f"http://127.0.0.1:{server.port}"
    adapters = AdapterSettings(
        file=file,
        memory=memory,
        idle_unload_s=idle_unload_s,
        keep_s=0.0,
        policy=SourcePolicy((tmp_path / "cache",), declared_only=True),
        cache=tmp_path / "cache",
        links=server.directory,
    )
    agent_settings = AgentSettings(
        url, TRITON, f"{url}/metrics", drain=DrainSettings(0.0, 30.0), adapters=adapters, probe_interval_s=0.02
    )
    port, downloads = free_port(), FakeDownloads(tmp_path)
    clock, unix_clock = asyncio.get_running_loop().time, time.time  # noqa: TID251 - the edge
    async with running_repository(server), EngineClient(url, TRITON) as client:
        agent = EngineAgent(agent_settings, client, downloads, clock=clock, unix_clock=unix_clock, follow_s=0.02)
        async with (
            serve_agent(AgentServer(agent, clock), "127.0.0.1", port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http,
        ):
            task = asyncio.create_task(agent.run())
            try:
                yield Running(server, http, file, downloads)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def test_several_make_room_for_one_and_one_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as one:
        one.declare(a={"memory": 4}, b={"memory": 4}, c={"memory": 9}, huge={"memory": 11})
        await eventually(lambda: _has(one, "huge"))
        assert (await one.load("a")).status_code == 200
        assert (await one.load("b")).status_code == 200
        loaded = await one.load("c")
        assert loaded.json()["evicted"] == ["a", "b"]
        assert one.server.ready == {"c"}
        refused = await one.load("huge")
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message == "huge needs 11 bytes, more than the 10 that all models may take here"


async def _has(one: Running, name: str) -> bool:
    return name in await one.states()


async def test_one_that_is_too_large_costs_no_other_model_of_the_file(tmp_path: Path) -> None:
    async with running(tmp_path) as one:
        one.declare(huge={"memory": 11, "pinned": True}, a={"memory": 1, "pinned": True})
        await eventually(lambda: one.server.ready == {"a"})

        async def is_ready() -> bool:
            return (await one.http.get("/ready")).status_code == 200

        await eventually(is_ready)
        assert "more than the 10" in await one.message("huge")


async def test_an_unused_model_is_shown_no_more_and_then_unloaded_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loader, "_LONGEST_LEAVE_S", 0.6)
    async with running(tmp_path, idle_unload_s=0.3) as one:
        one.declare(a={"memory": 1}, kept={"memory": 1, "pinned": True})
        await eventually(lambda: one.server.ready == {"a", "kept"})

        async def leaves() -> bool:
            return await one.states() == {"a": "unloading", "kept": "loaded"}

        await eventually(leaves, pause_s=0.005)
        # it is there still, and who asks for it keeps it: for less time than a busy machine takes to ask for its state
        assert (await one.load("a")).json()["state"] == "loaded"
        assert one.server.ready == {"a", "kept"}
        await eventually(lambda: one.server.ready == {"kept"})
        # the file has it, and it stays away until it is asked for
        await asyncio.sleep(0.2)
        assert one.server.ready == {"kept"}
        assert (await one.load("a")).status_code == 200
        assert one.server.ready == {"a", "kept"}

        # what the server counts is use
        async def in_use() -> None:
            one.server.finished["a"] = one.server.finished.get("a", 0) + 1
            await asyncio.sleep(0.05)

        for _ in range(20):
            await in_use()
            assert "a" in one.server.ready


async def test_broken_weights_are_told_once_and_another_source_is_tried_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as one:
        one.downloads.fails = ["no such object"] * 3
        one.declare(a={"memory": 1, "pinned": True}, b={"memory": 1, "pinned": True, "uri": "s3://m/b"})
        await eventually(lambda: len(one.downloads.fails) == 1)
        await asyncio.sleep(0.3)
        # the next try is two seconds away
        assert len(one.downloads.fails) == 1
        assert await one.states() == {"a": "failed", "b": "failed"}
        one.downloads.fails.clear()
        one.declare(a={"memory": 1, "pinned": True, "uri": "s3://m/mended"}, b={"memory": 1, "pinned": True})
        await eventually(lambda: one.server.ready == {"a"}, timeout_s=1.5)
        await eventually(lambda: one.server.ready == {"a", "b"})
    assert len([line for line in caplog.messages if "no such object" in line]) == 2
