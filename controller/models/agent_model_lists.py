# SPDX-License-Identifier: Apache-2.0
"""Which of many models each server has, and why loads have failed, as the agents in its pods list them.

An agent's words are those of its pod: no other Model's status has them. Answers are bounded, and none delays others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from controller.kube.pod_http import read_page
from controller.models.model.model_state import ReportedModel
from controller.models.runtimes.engine_settings import AGENT_PORT
from extproc.api.addresses import join_host_port

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import aiohttp

    from controller.kube.api_resources import Object

_TIMEOUT_S: Final = 3.0
_MOST_BYTES: Final = 4 << 20
_AT_ONCE: Final = 32


class _Page(msgspec.Struct, frozen=True):
    data: Annotated[list[ReportedModel], msgspec.Meta(max_length=4096)]


class AgentModelLists:
    """Over HTTP. ``pod``: by its key."""

    def __init__(self, http: aiohttp.ClientSession, pod: Callable[[str], Object | None]) -> None:
        self._http = http
        self._pod = pod
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._decoder = msgspec.json.Decoder(_Page)

    async def fetch(self, pods: Collection[str]) -> Mapping[str, Sequence[ReportedModel]]:
        """By the keys of pods, without those that do not answer. Returns within a few seconds, and never raises."""
        pages = await asyncio.gather(*(self._read(one) for one in pods))
        return {key: page for key, page in zip(pods, pages, strict=True) if page is not None}

    async def _read(self, key: str) -> Sequence[ReportedModel] | None:
        ip = ((self._pod(key) or {}).get("status") or {}).get("podIP")
        if not ip:
            return None
        url = f"http://{join_host_port(ip, AGENT_PORT)}/v1/adapters"
        async with self._at_once:
            page = await read_page(self._http, url, self._decoder, timeout_s=_TIMEOUT_S, most_bytes=_MOST_BYTES)
        return None if page is None else page.data
