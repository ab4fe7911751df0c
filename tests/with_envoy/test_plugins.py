# SPDX-License-Identifier: Apache-2.0
"""A plugin of another package fails behind a real Envoy: each request is answered, and extproc says who failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from tests.plugin_package import HEAD, install_plugin

if TYPE_CHECKING:
    from pathlib import Path

PLUGINS = f"""{HEAD}
class Raises(msgspec.Struct, frozen=True):
    def score(self, view, candidates):
        return view.table.traits


class Sometimes(msgspec.Struct, frozen=True):
    def keep(self, view, candidates):
        return candidates if view.request.input_tokens < 100 else candidates[:1]


RAISES, SOMETIMES = PluginType("scorer", Raises), PluginType("filter", Sometimes)
"""
PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: raises}
- {type: sometimes}
- {type: prefix-cache-scorer}
"""


@pytest.mark.usefixtures("full_starts")
async def test_every_request_is_answered_while_a_plugin_fails_and_the_log_and_a_metric_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    module = install_plugin(site, PLUGINS, {"raises": "my_package:RAISES", "sometimes": "my_package:SOMETIMES"})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    file = tmp_path / "epp.yaml"
    file.write_text(PICKER)
    async with (
        running_stack(tmp_path / "stack", EngineFlags(count=2, speed=50.0), picker=file) as stack,
        httpx.AsyncClient(timeout=30) as http,
    ):

        async def ask(text: str) -> int:
            body = {"model": ALIAS, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
            return (await http.post(f"{stack.url}/v1/chat/completions", json=body)).status_code

        assert set(await asyncio.gather(*(ask(f"{one}") for one in range(20)))) == {200}
        assert set(await asyncio.gather(*(ask(f"{one} long" * 200) for one in range(20)))) == {200}
        page = (await http.get(f"{stack.metrics}/metrics")).text
        picks = {line.rpartition(" ")[2] for line in page.splitlines() if line.startswith("attache_picks_total{")}
    named = 'attache_plugin_failures_total{plugin="%s",server="default/llama"} %s'
    assert picks == {"40.0"}
    assert named % ("raises", "40.0") in page
    assert named % ("sometimes", "20.0") in page
    log = (tmp_path / "stack" / "extproc.log").read_text()
    assert log.count("the plugin 'raises' of default/llama fails") == 2, "once with its traceback, and the tenth time"
    assert log.count("Traceback") == 1
    line = 1 + PLUGINS.splitlines().index("        return view.table.traits")
    assert f'File "{module}", line {line}, in score' in log
    assert "'keep' returned array([ True]); return True or False for each of the 8 rows" in log
