# SPDX-License-Identifier: Apache-2.0
"""Whatever a file holds, it is used or refused: at random here, and the known killers through the processes."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from bench.stack.processes import free_ports
from controller.__main__ import main as controller
from extproc.__main__ import main as extproc
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from tests.examples import examples
from tests.fuzz.files import mutant, try_files
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.stack.orphan_reaper import ProcessGuard

GOOD: Final = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: s}
spec: {model: m, endpoints: [{address: "127.0.0.1:1"}]}
"""
PICKED: Final = GOOD.replace("model: m,", "model: m, pickerConfig: bad.yaml,").replace("name: s", "name: p")
PICKER: Final = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
LAUGHS: Final = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))

# text of bad.yaml, and what is said of it
KILLERS: Final = {
    "bool": ("a: !!bool maybe", "bad.yaml:1: a tag"),
    "int": ('\na: !!int ""', "bad.yaml:2: a tag"),
    "timestamp": ("a: !!timestamp x", "bad.yaml:1: a tag"),
    "date": ("a: 1\nb: 2001-99-99", "bad.yaml:2: not YAML: it looks like a date"),
    "itself": ("&a [*a]", "bad.yaml:1: an alias that refers to itself"),
    "set": ("!!set", "bad.yaml:1: a tag"),
    "deep": ("[" * 100_000, "bad.yaml:1: nested more than 64 deep"),
    "deep mappings": ("%YAML 1.1\n---\n" + "{a: " * 100_000, "nested more than 64 deep"),
    "laughs": (LAUGHS, "more than 250000 values with all aliases written out"),
    "many": ("[" + "a," * 300_000 + "]", "bad.yaml:1: more than 250000 values"),
    "documents": ("---\n" * 100_000, "bad.yaml: has more than 10000 documents"),
    "digits": ("a: " + "1:" * 50_000 + "1", "bad.yaml:1: a number that is too long"),
    "key": ("? [a]\n: b", "bad.yaml:1: a key that is not text"),
    "huge": ("#" * 50_000_000, "bad.yaml: has 50000000 bytes"),
    "infinite": (PICKER + "plugins:\n- {type: queue-scorer, parameters: {a: .inf}}", "bad.yaml:4:"),
    "expression": (
        (
            "apiVersion: attache.dev/v1alpha1\nkind: ModelRoute\nmetadata: {name: r}\nspec:\n  modelName: m\n "
            f" rules:\n  - modelMatch: {{uri: {{regex: '{'(' * 5000}'}}}}\n    targetModels: [{{modelServerName: s}}]\n"
        ),
        "bad.yaml:7: spec.rules[0].modelMatch.uri.regex: not a regular expression",
    ),
    "size": (PICKER + "featureGates: [flowControl]\nflowControl: {maxRequests: 10X}", "bad.yaml:4: flowControl.maxReq"),
    "parameter": (PICKER + "plugins:\n- {type: random-picker, parameters: {maxNumOfEndpoints: 10G}}", "bad.yaml:4:"),
}


# size is a matter of the directory, parameters are one of the plugins: both are below
@pytest.mark.parametrize("name", sorted(KILLERS.keys() - {"huge", "parameter"}))
def test_a_killer_is_refused_with_file_and_line(name: str) -> None:
    text, said = KILLERS[name]
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"good.yaml": GOOD.encode(), "bad.yaml": text.encode()})
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "1" * 5000 + "}", '{"a": 1e999}'])
def test_json_is_bounded_too(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"bad.json:1: n"):
        load_snapshot({"good.yaml": GOOD.encode(), "bad.json": text.encode()})


def test_a_key_is_in_no_message() -> None:
    gateway = "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {authentication: A}\n"
    for written in (
        "{apiKeys: [{name: a, key: sk-top, tenant: t}]}",
        "{apiKeys: [sk-top]}",
        "{apiKeys: sk-top}",
        "{apiKeys: [{name: SK-top, key: [sk-top], tenant: {a: sk-top}}]}",
        "sk-top",
        "{apiKeys: [{name: a, key: !!int sk-top, tenant: t}]}",
        "{apiKeys: [{name: a, key: *sk-top, tenant: t}]}",
    ):
        with pytest.raises(ConfigInvalid) as caught:
            load_snapshot({"g.yaml": gateway.replace("authentication: A", f"authentication: {written}").encode()})
        assert "sk-top" not in str(caught.value).lower()


@pytest.mark.parametrize("written", ["sk-top", "[sk-top]", "{sk: sk-top}", "!!int sk-top"])
def test_the_secret_of_caches_is_in_no_message(written: str) -> None:
    text = (
        "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {cacheSecret:"
        f" {written}}}\n"
    )
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"g.yaml": text.encode()})
    assert "sk-top" not in str(caught.value)


def test_files_broken_at_random_are_used_or_refused() -> None:
    used = sum(try_files(mutant(random.Random(seed))) for seed in range(examples(1000)))
    assert used, "some are only broken in what does not matter"


class Followed:
    """extproc and the writer of bundles, which follow a directory."""

    def __init__(self, path: Path, guard: ProcessGuard) -> None:
        self.config, self.out, self._guard = path / "config", path / "out", guard
        self._logs = [path / "extproc.log", path / "controller.log"]
        self._metrics = f"127.0.0.1:{free_ports(1)[0]}"
        self.config.mkdir()
        (self.config / "good.yaml").write_text(GOOD)
        socket = f"unix:{path}/extproc.sock"
        self.commands = (
            ["extproc", "--config", str(self.config), "--listen", socket, "--metrics", self._metrics, "--settle", "0s"],
            ["controller", "bundle", "--watch", "--config", str(self.config), "--out", str(self.out)],
        )
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        for command, log in zip(self.commands, self._logs, strict=True):
            with log.open("wb") as file:
                words = (sys.executable, "-m", *command)
                one = await asyncio.create_subprocess_exec(*words, stderr=file, start_new_session=True)
            self._guard.add(one.pid)
            self.processes.append(one)
        await self.until((self.out / "bootstrap.json").is_file)
        await eventually(self._is_ready)

    async def stop(self) -> None:
        for one in self.processes:
            if one.returncode is None:
                one.terminate()
            await one.wait()
            self._guard.remove(one.pid)

    def logs(self) -> list[str]:
        return [log.read_text() for log in self._logs]

    async def until(self, holds: Callable[[], bool]) -> None:
        def answer() -> bool:
            assert all(one.returncode is None for one in self.processes), self.logs()
            return holds()

        # the machine may be busy, and some of these files take seconds
        await eventually(answer, timeout_s=180)

    async def _is_ready(self) -> bool:
        async with httpx.AsyncClient(timeout=60) as http:
            try:
                return (await http.get(f"http://{self._metrics}/readyz")).status_code == 200
            except httpx.TransportError:
                return False


@pytest.mark.slow
async def test_running_processes_refuse_each_killer_and_go_on(tmp_path: Path, guard: ProcessGuard) -> None:
    both = Followed(tmp_path, guard)
    try:
        await both.start()
        for number, name in enumerate(KILLERS, start=2):
            await refuses(both, name)
            await takes(both, f"127.0.0.1:{number}")
    finally:
        await both.stop()


async def refuses(both: Followed, name: str) -> None:
    text, said = KILLERS[name]
    seen = [len(log) for log in both.logs()]
    if name == "parameter":
        (both.config / "good.yaml").write_text(GOOD + "---\n" + PICKED)
    (both.config / "bad.yaml").write_text(text)
    # which plugins there are, extproc alone knows
    count = 1 if name == "parameter" else 2

    def is_refused() -> bool:
        return all(said in log[start:] for log, start in list(zip(both.logs(), seen, strict=True))[:count])

    await both.until(is_refused)


async def takes(both: Followed, address: str) -> None:
    (both.config / "bad.yaml").unlink()
    seen = len(both.logs()[0])
    (both.config / "good.yaml").write_text(GOOD.replace("127.0.0.1:1", address))
    written = both.out / "eds" / "default" / "s.json"
    await both.until(lambda: f'"port_value": {address.rpartition(":")[2]}' in written.read_text())
    await both.until(lambda: " applied: " in both.logs()[0][seen:])


async def test_started_processes_say_what_is_wrong_and_end_with_2(tmp_path: Path, guard: ProcessGuard) -> None:
    both = Followed(tmp_path, guard)
    text, said = KILLERS["bool"]
    (both.config / "bad.yaml").write_text(text)
    for command in both.commands:
        one = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        guard.add(one.pid)
        _, stderr = await one.communicate()
        guard.remove(one.pid)
        assert (one.returncode, said in stderr.decode()) == (2, True), stderr.decode()[-2000:]


@pytest.mark.parametrize("name", ["itself", "set", "deep", "laughs", "huge", "parameter"])
def test_programs_that_cannot_start_end_with_2(
    name: str, tmp_path: Path, guard: ProcessGuard, capsys: pytest.CaptureFixture[str]
) -> None:
    both = Followed(tmp_path, guard)
    text, said = KILLERS[name]
    (both.config / "bad.yaml").write_text(text)
    if name == "parameter":
        (both.config / "good.yaml").write_text(PICKED)
    # which plugins there are, extproc alone knows
    mains = (extproc,) if name == "parameter" else (extproc, controller)
    for main, (_, *words) in zip(mains, both.commands, strict=False):
        assert main([word for word in words if word != "--watch"]) == 2
        assert said in capsys.readouterr().err
