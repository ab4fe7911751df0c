# SPDX-License-Identifier: Apache-2.0
"""Envoy's administration where no browser reaches it: at a path, as the docs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from bench.stack.processes import free_ports
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCS: Final = Path(__file__).parents[2] / "docs" / "operations.md"
CHAT: Final[Mapping[str, object]] = {"model": "llama", "messages": []}


async def test_envoys_administration_is_at_a_path_instead_of_a_port(tmp_path: Path) -> None:
    (option,) = re.findall("--config-yaml '(.*pipe.*)'", DOCS.read_text())
    port, path = free_ports(1)[0], tmp_path / "admin.sock"
    async with gateway_on(
        tmp_path,
        gateway={"admin": f"127.0.0.1:{port}"},
        envoy_options=("--config-yaml", option.replace("/run/envoy.sock", str(path))),
    ) as gateway:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as http:
            assert (await http.get("http://localhost/ready")).text == "LIVE\n"
            assert (await http.post("http://localhost/quitquitquit")).status_code == 403
        with pytest.raises(httpx.ConnectError):
            await gateway.http.get(f"http://127.0.0.1:{port}/ready")
        assert path.stat().st_mode & 0o777 == 0o600
        answer = await gateway.http.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
