# SPDX-License-Identifier: Apache-2.0
"""What ``attache top`` and ``attache explain`` print, in the pages about them.

A real core prints it. Its requests, reports and failures are made up, and its clock stands still, so that it always
prints the same.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from extproc.cli.top_view import MetricsSnapshot, render
from extproc.core.explanation import to_text
from extproc.core.request_record import RequestHead
from extproc.wire_names import TENANT
from tools.console_pictures import UNIX_S, Gateway, snapshot_of

if TYPE_CHECKING:
    from extproc.streams.request import StreamRequest

_DOCS: Final = Path(__file__).parent.parent / "docs"
_SERVER: Final = "llama"
_ENGINES: Final = tuple(f"10.0.0.{number}:8000" for number in range(1, 5))
# It answers 500.
_ILL: Final = _ENGINES[2]
_TENANTS: Final = ("acme", "bell")
_IN_PROGRESS: Final = 40
_SYSTEM: Final = "You are a helpful assistant. " * 60
_INTERVAL_S: Final = 1.0
_MINUTE_S: Final = 60.0


class _Scene:
    """Four engines under load, one of which fails."""

    def __init__(self) -> None:
        server: dict[str, object] = {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "endpoints": [{"address": one} for one in _ENGINES],
            "flowControl": {},
        }
        route: dict[str, object] = {"modelName": "llama", "rules": [{"targetModels": [{"modelServerName": _SERVER}]}]}
        self.gateway = Gateway(snapshot_of({_SERVER: server}, {"chat": route}))
        self.gateway.metrics.on_config_applied()
        self._draws = random.Random(3)
        self._running: list[StreamRequest] = []

    def run(self, seconds: float) -> None:
        """Five requests a second, of which forty are in progress."""
        gateway, draws = self.gateway, self._draws
        for number in range(round(5 * seconds)):
            gateway.now += 0.2
            if not number % 5:
                self._report()
            tenant = draws.choices(_TENANTS, (3, 2))[0]
            gateway.metrics.on_stream_opened()
            self._running.append(gateway.send(tenant, "llama", self._prompt(tenant), most=400))
            while len(self._running) > _IN_PROGRESS:
                self._end(self._running.pop(draws.randrange(8)))

    def snapshot(self) -> MetricsSnapshot:
        """Its metrics page as ``attache top`` reads it."""
        found = MetricsSnapshot()
        for family in text_string_to_metric_families("".join(self.gateway.metrics.registry.exposition_chunks())):
            for sample in family.samples:
                found.add(sample.name, sample.labels, sample.value)
        return found

    def explain(self) -> str:
        """Of the next request of the first tenant."""
        core = self.gateway.core
        head = RequestHead("POST", "/v1/chat/completions", {TENANT: _TENANTS[0]}, has_body=True, is_trusted=True)
        arrival = core.builder.build_by_model(head, json.dumps(self._body(_TENANTS[0])).encode())
        return to_text(core.explain(arrival, self.gateway.now))

    def _body(self, tenant: str) -> dict[str, object]:
        return {"model": "llama", "messages": [{"role": "user", "content": self._prompt(tenant)}], "stream": True}

    def _prompt(self, tenant: str) -> str:
        chat = self._draws.randrange(12)
        return f"{tenant}: {_SYSTEM}{chat}" + f" word {chat}" * self._draws.randrange(100, 1500)

    def _report(self) -> None:
        table = self.gateway.core.pools[f"default/{_SERVER}"].table
        for address in _ENGINES:
            row = table.row_of(address)
            running = 0.0 if row is None else float(table.in_flight[row])
            values = {"waiting": 0.0, "running": running, "kv_usage": 0.05 + 0.03 * running, "tpot_s": 0.02}
            self.gateway.engine_reports(f"default/{_SERVER}", address, **values)

    def _end(self, request: StreamRequest) -> None:
        self.gateway.metrics.on_stream_closed(2.0)
        if request.sent is not None and request.sent.endpoint.address == _ILL:
            self.gateway.end(request, ttft_s=0.01, seconds=0.01, status=500)
        else:
            self.gateway.end(request, ttft_s=self._draws.uniform(0.1, 0.4), seconds=2.0)


def top_picture(scene: _Scene) -> str:
    """What ``attache top`` shows of the scene's next second."""
    before = scene.snapshot()
    scene.run(_INTERVAL_S)
    return render(before, scene.snapshot(), seconds=_INTERVAL_S, tenants=9, wall_now_s=UNIX_S)


def pages() -> dict[Path, str]:
    """The pages, each with its block written anew; raises ValueError if it has no place for one."""
    scene = _Scene()
    scene.run(_MINUTE_S)
    blocks = {"operations.md": ("attache top", top_picture(scene)), "picking.md": ("attache explain", scene.explain())}
    return {_DOCS / page: with_block((_DOCS / page).read_text(), *block) for page, block in blocks.items()}


def with_block(page: str, name: str, text: str) -> str:
    """The page with the block below the comment that names it; raises ValueError if it has no place for one."""
    begin, end = f"<!-- {name}: written by make generate -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"a page needs the lines '{begin.strip()}' and '{end}'")
    return f"{before}{begin}```text\n{text.strip()}\n```\n{end}{after}"
