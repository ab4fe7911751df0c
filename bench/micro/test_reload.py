# SPDX-License-Identifier: Apache-2.0
"""What a changed configuration costs: 50 ModelServers of 40 endpoints, as 100 files or one, in YAML and in JSON."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest
import yaml

from extproc.api.config_loader import ConfigDirectory
from extproc.api.spec import API_VERSION
from extproc.core.core import Core

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture

SERVERS = 50
ENDPOINTS = 40
Format = Literal["yaml", "json"]
# processor time: a reload runs beside requests
pytestmark = pytest.mark.benchmark(timer=time.process_time)
layouts = pytest.mark.parametrize("files", ["file-each", "one-file"])
formats = pytest.mark.parametrize("form", ["yaml", "json"])


def documents(number: int, changed: int) -> list[dict[str, object]]:
    """A ModelServer, whose first endpoint's address depends on ``changed``, and the ModelRoute to it."""
    addresses = [f"10.{number}.0.{one + 1}:8000" for one in range(ENDPOINTS)]
    if number == 0:
        addresses[0] = f"10.200.{changed // 250}.{changed % 250}:8000"
    labels = {"zone": "a", "llm-d.ai/role": "decode"}
    endpoints = [{"address": one, "labels": labels} for one in addresses]
    rules = [{"targetModels": [{"modelServerName": f"server-{number}"}]}]
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "ModelServer",
            "metadata": {"name": f"server-{number}"},
            "spec": {"model": f"org/model-{number}", "endpoints": endpoints},
        },
        {
            "apiVersion": API_VERSION,
            "kind": "ModelRoute",
            "metadata": {"name": f"model-{number}"},
            "spec": {"modelName": f"model-{number}", "rules": rules},
        },
    ]


class ReloadFixture:
    """A directory, and the core that follows it."""

    def __init__(self, path: Path, form: Format, files: str) -> None:
        self._path = path
        self._form = form
        self._is_one_file = files == "one-file"
        self._changes = 0
        self._texts = {number: self._encode(documents(number, 0)) for number in range(SERVERS)}
        for number in range(SERVERS):
            self._write(number)
        self.directory = ConfigDirectory(path)
        self.core = Core(self.directory.read(), rng=random.Random(0), ticket_prefix="t")

    def _encode(self, found: list[dict[str, object]]) -> list[str]:
        if self._form == "json":
            return [msgspec.json.format(msgspec.json.encode(one)).decode() for one in found]
        dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
        return [yaml.dump(one, Dumper=dumper, sort_keys=False) for one in found]

    def _write(self, number: int) -> None:
        """By rename, as editors and Kubernetes do."""
        name = "all" if self._is_one_file else f"model-{number:02}"
        texts = [text for number in range(SERVERS) for text in self._texts[number]] if self._is_one_file else None
        found = texts or self._texts[number]
        whole = "---\n".join(found) if self._form == "yaml" else "[" + ",\n".join(found) + "]\n"
        draft = self._path / f".{name}"
        draft.write_text(whole)
        draft.replace(self._path / f"{name}.{self._form}")

    def change(self) -> None:
        """Another address for one endpoint of 2,000."""
        self._changes += 1
        self._texts[0] = self._encode(documents(0, self._changes))
        self._write(0)

    def reload(self) -> None:
        """From the changed bytes to the applied snapshot."""
        self.core.apply(self.directory.read(), 0.0)


@layouts
@formats
def test_a_reload_after_one_endpoint_changed(
    benchmark: BenchmarkFixture, tmp_path: Path, form: Format, files: str
) -> None:
    scene = ReloadFixture(tmp_path, form, files)
    others = {name: pool for name, pool in scene.core.pools.items() if name != "default/server-0"}
    pickers = {name: pool.picker for name, pool in others.items()}
    benchmark.pedantic(scene.reload, setup=scene.change, rounds=30)  # type: ignore[no-untyped-call]  # the library leaves types out
    addresses = scene.core.pools["default/server-0"].table.active_addresses
    assert any(one.startswith("10.200.") for one in addresses)
    assert all(scene.core.pools[name].picker is picker for name, picker in pickers.items())


@layouts
@formats
def test_a_first_load(benchmark: BenchmarkFixture, tmp_path: Path, form: Format, files: str) -> None:
    ReloadFixture(tmp_path, form, files)

    def load() -> Core:
        return Core(ConfigDirectory(tmp_path).read(), rng=random.Random(0), ticket_prefix="t")

    core = benchmark.pedantic(load, rounds=5)  # type: ignore[no-untyped-call]  # the library leaves types out
    assert len(core.pools) == SERVERS


def test_check_whether_a_hundred_files_have_changed(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    scene = ReloadFixture(tmp_path, "yaml", "file-each")
    for number in range(SERVERS, 100):
        (tmp_path / f"{number}.yaml").write_text("# nothing\n")
    scene.reload()
    scene.directory.has_changed()
    assert not benchmark(scene.directory.has_changed)
