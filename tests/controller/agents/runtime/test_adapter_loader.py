# SPDX-License-Identifier: Apache-2.0
"""Adapters beside an engine: loaded, evicted, declared, refused."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import httpx
import pytest

from controller.agents.runtime.declared_adapters import SourcePolicy, adapter_link_name
from tests.controller.agents.runtime.doubles import FakeEngine, beside
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    one = FakeEngine()
    await one.start()
    yield one
    await one.stop()


def declare(file: Path, adapters: object) -> None:
    """As a ConfigMap volume does: a new directory, then a link is replaced."""
    text = adapters if isinstance(adapters, str) else json.dumps(adapters)
    if not file.parent.is_symlink():
        file.parent.with_name("data-0").mkdir()
        file.parent.symlink_to(file.parent.with_name("data-0"))
    new = file.parent.with_name(f"data-{os.urandom(4).hex()}")
    new.mkdir()
    (new / file.name).write_text(text)
    fresh = file.parent.with_name("fresh")
    fresh.symlink_to(new)
    fresh.replace(file.parent)


async def test_an_adapter_is_downloaded_and_loaded(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        answer = await agent.load("sql", "hf://acme/sql")
        assert answer.json() == {"id": "sql", "state": "loaded", "evicted": []}
        link = tmp_path / "cache" / "adapters" / adapter_link_name("sql", "hf://acme/sql")
        assert engine.adapters == {"sql": str(link)}
        assert link.is_dir()
        listed = (await agent.http.get("/v1/adapters")).json()["data"]
        assert [(one["id"], one["state"]) for one in listed] == [("sql", "loaded")]
        assert await agent.metric("adapters_loaded") == 1
        assert await agent.metric('adapter_loads_total{result="loaded"}') == 1


async def test_loading_once_more_is_a_success_that_does_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        await agent.load("sql", "hf://acme/sql")
        assert (await agent.load("sql", "hf://acme/sql")).status_code == 200
        assert agent.downloads.fetched == ["hf://acme/sql"]
        assert engine.calls == [("load", "sql")]


async def test_callers_of_one_adapter_wait_for_one_load(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        agent.downloads.gate = asyncio.Event()
        loads = [asyncio.create_task(agent.load("sql", "hf://acme/sql")) for _ in range(5)]
        await eventually(lambda: bool(agent.downloads.fetched))
        agent.downloads.gate.set()
        assert {(await one).status_code for one in loads} == {200}
        assert agent.downloads.fetched == ["hf://acme/sql"]
        assert engine.calls == [("load", "sql")]


async def test_a_caller_that_leaves_does_not_end_the_load(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        agent.downloads.gate = asyncio.Event()
        with pytest.raises(httpx.ReadTimeout):
            await agent.http.post(
                "/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "hf://acme/sql"}, timeout=0.2
            )
        agent.downloads.gate.set()
        await eventually(lambda: "sql" in engine.adapters)


async def test_the_engine_is_changed_by_one_at_a_time(engine: FakeEngine, tmp_path: Path) -> None:
    engine.load_s = 0.05
    async with beside(engine, tmp_path) as agent:
        answers = await asyncio.gather(*(agent.load(f"a{number}", f"hf://acme/{number}") for number in range(4)))
        assert [one.status_code for one in answers] == [200] * 4
        assert engine.most_loads_at_once == 1


async def test_the_least_recently_used_adapter_goes(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path, adapters={"limit": 2}) as agent:
        for name, evicted in (("a", []), ("b", []), ("a", []), ("c", ["b"])):
            answer = await agent.load(name, f"hf://acme/{name}")
            assert answer.json() == {"id": name, "state": "loaded", "evicted": evicted}
        assert set(engine.adapters) == {"a", "c"}
        assert engine.calls == [("load", "a"), ("load", "b"), ("unload", "b"), ("load", "c")]
        assert await agent.metric('adapter_unloads_total{reason="evicted"}') == 1
        # another pod of the node may have it by the same link
        assert (tmp_path / "cache" / "adapters" / adapter_link_name("b", "hf://acme/b")).is_dir()


async def test_an_adapter_in_use_stays(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path, adapters={"limit": 2}) as agent:
        for name in ("a", "b"):
            await agent.load(name, f"hf://acme/{name}")
        engine.in_use, engine.running = ["a"], 1
        assert (await agent.load("c", "hf://acme/c")).status_code == 200
        assert set(engine.adapters) == {"a", "c"}
        engine.in_use = ["a", "c"]
        refused = await agent.load("d", "hf://acme/d")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "in use" in refused.json()["error"]["message"]
        engine.in_use, engine.running = ["c"], 1
        assert (await agent.load("d", "hf://acme/d")).status_code == 200
        assert set(engine.adapters) == {"c", "d"}


async def test_while_the_engine_does_not_tell_which_are_in_use_none_goes(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path, adapters={"limit": 1}) as agent:
        await agent.load("a", "hf://acme/a")
        engine.has_metrics = False
        assert (await agent.load("b", "hf://acme/b")).status_code == 503
        assert set(engine.adapters) == {"a"}


async def test_an_adapter_that_was_just_loaded_stays_for_the_request_that_asked(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with beside(engine, tmp_path, adapters={"limit": 1, "keep_s": 60.0}) as agent:
        await agent.load("a", "hf://acme/a")
        assert (await agent.load("b", "hf://acme/b")).status_code == 503


async def test_an_engine_that_says_it_is_full_teaches_its_limit(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path, adapters={"limit": 9}) as agent:
        for name in ("a", "b"):
            await agent.load(name, f"hf://acme/{name}")
        engine.most_adapters = 2
        assert (await agent.load("c", "hf://acme/c")).status_code == 200
        assert set(engine.adapters) == {"b", "c"}
        assert await agent.metric("adapters_limit") == 2


async def test_a_rank_that_is_too_high_evicts_nobody(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        await agent.load("a", "hf://acme/a")
        engine.refuses_load = "LoRA rank 64 is greater than max_lora_rank 16."
        refused = await agent.load("b", "hf://acme/b")
        assert refused.status_code == 502
        assert "max_lora_rank" in refused.json()["error"]["message"]
        assert set(engine.adapters) == {"a"}
        assert await agent.metric('adapter_loads_total{result="failed"}') == 1


async def test_a_download_that_fails_is_told_and_tried_again(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        agent.downloads.fails = ["404 for hf://acme/sql"]
        refused = await agent.load("sql", "hf://acme/sql")
        assert refused.status_code == 502
        assert "404 for hf://acme/sql" in refused.json()["error"]["message"]
        listed = (await agent.http.get("/v1/adapters")).json()["data"]
        assert [(one["id"], one["state"]) for one in listed] == [("sql", "failed")]
        assert (await agent.load("sql", "hf://acme/sql")).status_code == 200


async def test_an_engine_that_does_not_answer_is_no_fault_of_the_adapter(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        await engine.stop()
        refused = await agent.load("sql", "hf://acme/sql")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        await engine.start()
        assert (await agent.load("sql", "hf://acme/sql")).status_code == 200


async def test_unloading(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        await agent.load("sql", "hf://acme/sql")
        assert (await agent.unload("sql")).json() == {"id": "sql", "state": "unloaded"}
        assert engine.adapters == {}
        assert (await agent.unload("sql")).status_code == 404


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("../sql", "hf://acme/sql"),
        ("a//b", "hf://acme/sql"),
        ("", "hf://acme/sql"),
        ("sql", ""),
        ("sql", "relative/path"),
        ("sql", "/etc"),
        ("sql", "file:///etc/passwd"),
        ("sql", "file:///cache/../etc"),
        ("sql", "hf://acme/../../etc"),
        ("sql", "HF://acme/sql x"),
    ],
)
async def test_names_and_sources_that_are_refused(name: str, source: str, engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        refused = await agent.load(name, source)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert engine.calls == []
        assert agent.downloads.fetched == []


async def test_a_local_adapter_below_an_allowed_directory(engine: FakeEngine, tmp_path: Path) -> None:
    files = tmp_path / "cache" / "sql"
    files.mkdir(parents=True)
    (tmp_path / "cache" / "out").symlink_to("/etc")
    async with beside(engine, tmp_path) as agent:
        assert (await agent.load("sql", f"file://{files}")).status_code == 200
        assert engine.adapters == {"sql": str(files)}
        assert (await agent.load("out", str(tmp_path / "cache" / "out"))).status_code == 400


async def test_only_uris_that_are_allowed_come_by_calls(engine: FakeEngine, tmp_path: Path) -> None:
    policy = SourcePolicy((), ("s3://adapters/",))
    async with beside(engine, tmp_path, adapters={"policy": policy}) as agent:
        assert (await agent.load("sql", "http://169.254.169.254/latest")).status_code == 400
        assert (await agent.load("sql", "s3://adapters/sql")).status_code == 200


async def test_changing_calls_need_the_token(engine: FakeEngine, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with beside(engine, tmp_path, token_file=token) as agent:
        refused = await agent.load("sql", "hf://acme/sql")
        assert refused.status_code == 401
        assert (await agent.load("sql", "hf://acme/sql", Authorization="Bearer wrong")).status_code == 401
        assert (await agent.http.delete("/drain")).status_code == 401
        assert (await agent.unload("sql")).status_code == 401
        assert (await agent.load("sql", "hf://acme/sql", Authorization="Bearer s3cret")).status_code == 200
        assert (await agent.http.get("/metrics")).status_code == 200
        token.unlink()
        assert (await agent.load("b", "hf://acme/b", Authorization="Bearer s3cret")).status_code == 401


async def test_declared_adapters_are_loaded_at_start_and_again_after_a_restart(
    engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {"sql": {"uri": "hf://acme/sql", "pinned": True}, "chat": {"uri": "hf://acme/chat"}})
    async with beside(engine, tmp_path, adapters={"file": file}) as agent:
        await eventually(lambda: set(engine.adapters) == {"sql", "chat"})
        await engine.start_again()
        await eventually(lambda: set(engine.adapters) == {"sql", "chat"})
        # a caller need not know where it is
        assert (await agent.load("chat")).status_code == 200


async def test_ready_once_pinned_adapters_are_there_or_have_failed(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {"sql": {"uri": "hf://acme/sql", "pinned": True}, "bad": {"uri": "hf://acme/bad", "pinned": True}})
    async with beside(engine, tmp_path, adapters={"file": file}) as agent:
        agent.downloads.gate = asyncio.Event()
        agent.downloads.fails = ["404"]
        await eventually(lambda: len(agent.downloads.fetched) == 2)
        await eventually(lambda: agent.agent.watch.health.phase == "serving")
        assert (await agent.http.get("/ready")).text == "pinned adapters are being loaded\n"
        agent.downloads.gate.set()
        await eventually(agent.is_ready)
        assert len(engine.adapters) == 1
        # a restart of the engine begins anew
        agent.downloads.gate.clear()
        await engine.stop()
        await eventually(lambda: agent.agent.watch.health.phase == "starting")
        await asyncio.sleep(0.1)
        engine.adapters = {}
        await engine.start()
        await eventually(lambda: agent.agent.watch.health.phase == "serving")
        agent.downloads.gate.set()
        await eventually(agent.is_ready)


async def test_the_file_is_followed(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {"a": {"uri": "hf://acme/a"}, "b": {"uri": "hf://acme/b"}})
    async with beside(engine, tmp_path, adapters={"file": file}) as agent:
        await eventually(lambda: set(engine.adapters) == {"a", "b"})
        engine.in_use, engine.running = ["a"], 1
        declare(file, {"b": {"uri": "hf://acme/b2"}, "c": {"uri": "hf://acme/c"}})
        # other files have another path, under the same name
        await eventually(lambda: engine.adapters.get("b", "").endswith(adapter_link_name("b", "hf://acme/b2")))
        await eventually(lambda: set(engine.adapters) == {"a", "b", "c"})
        # 'a' goes once it is idle
        engine.in_use, engine.running = [], 0
        await eventually(lambda: set(engine.adapters) == {"b", "c"})
        assert await agent.metric('adapter_unloads_total{reason="removed"}') == 1
        assert await agent.metric('adapter_unloads_total{reason="replaced"}') == 1


async def test_a_broken_file_changes_nothing_and_is_told(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {"a": {"uri": "hf://acme/a"}})
    async with beside(engine, tmp_path, adapters={"file": file}) as agent:
        await eventually(lambda: set(engine.adapters) == {"a"})
        for broken in ("{", [], {"a": {"uri": ""}}, {"a": {"uri": "file:///etc"}}):
            declare(file, broken)

            async def is_told() -> bool:
                return await agent.metric("adapters_file_good") == 0

            await eventually(is_told)
            assert set(engine.adapters) == {"a"}
            declare(file, {"a": {"uri": "hf://acme/a"}})

            async def is_good() -> bool:
                return await agent.metric("adapters_file_good") == 1

            await eventually(is_good)


async def test_a_pinned_adapter_is_never_evicted_or_unloaded(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {"sql": {"uri": "hf://acme/sql", "pinned": True}})
    async with beside(engine, tmp_path, adapters={"file": file, "limit": 1}) as agent:
        await eventually(lambda: set(engine.adapters) == {"sql"})
        assert (await agent.load("b", "hf://acme/b")).status_code == 503
        assert (await agent.unload("sql")).status_code == 409


async def test_a_pinned_adapter_takes_the_place_of_another(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {})
    async with beside(engine, tmp_path, adapters={"file": file, "limit": 1}) as agent:
        await agent.load("b", "hf://acme/b")
        declare(file, {"x": {"uri": "hf://acme/x"}, "sql": {"uri": "hf://acme/sql", "pinned": True}})
        await eventually(lambda: set(engine.adapters) == {"sql"})


async def test_an_adapter_that_was_unloaded_by_a_call_stays_away_until_it_is_asked_for(
    engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "volume" / "adapters.json"
    declare(file, {"a": {"uri": "hf://acme/a"}})
    async with beside(engine, tmp_path, adapters={"file": file}) as agent:
        await eventually(lambda: set(engine.adapters) == {"a"})
        await agent.unload("a")
        await asyncio.sleep(0.3)
        assert engine.adapters == {}
        await agent.load("a")
        assert set(engine.adapters) == {"a"}


async def test_ten_adapters_over_an_engine_that_holds_two(engine: FakeEngine, tmp_path: Path) -> None:
    """Each caller asks until its adapter is there, and again if it was evicted before the request came."""
    engine.most_adapters = 2
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        name = f"a{number % 10}"
        for _ in range(1000):
            if (await agent.load(name, f"hf://acme/{name}")).status_code == 200:
                break
            await asyncio.sleep(0.02)
        if name not in engine.adapters:  # evicted before its request came: ask again
            return await one(number)
        engine.in_use.append(name)
        engine.running += 1
        await asyncio.sleep(0.01 * (number % 3))
        engine.in_use.remove(name)
        engine.running -= 1
        done += 1
        return None

    async with beside(engine, tmp_path, adapters={"limit": 2}) as agent:
        await asyncio.gather(*(one(number * 7) for number in range(30)))
        assert done == 30
        assert len(engine.adapters) <= 2
        assert await agent.metric('adapter_unloads_total{reason="evicted"}') >= 8


async def test_with_declared_only_nobody_chooses_what_is_fetched(engine: FakeEngine, tmp_path: Path) -> None:
    """Other pods reach the port: what they name would be fetched with our credentials, from wherever we reach."""
    file = tmp_path / "config" / "adapters.json"
    declare(file, {"sql": {"uri": "hf://acme/sql"}})
    policy = SourcePolicy((tmp_path / "cache",), declared_only=True)
    async with beside(engine, tmp_path, adapters={"file": file, "policy": policy}) as agent:
        await eventually(lambda: "sql" in engine.adapters)
        for name, source in (
            ("law", "http://169.254.169.254/latest/meta-data"),
            ("sql", "http://169.254.169.254/latest/meta-data"),
            ("law", str(tmp_path / "cache" / "other")),
            ("law", ""),
        ):
            refused = await agent.load(name, source)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), "the file may follow"
        assert (await agent.load("sql", "hf://acme/sql")).status_code == 200
        assert agent.downloads.fetched == ["hf://acme/sql"]
