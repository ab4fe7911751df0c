# SPDX-License-Identifier: Apache-2.0
"""Asks gateways what the engines do for them: requests in flight, and tokens in caches, by address."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from extproc.api.loads import LOADS_LABEL, LOADS_PATH, EndpointLoad, total

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.kube.resources import Object

_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 4_000_000
_DECODER: Final = msgspec.json.Decoder(dict[str, EndpointLoad])

Loads = dict[str, EndpointLoad]


async def read_loads(http: aiohttp.ClientSession, addresses: Iterable[str]) -> Loads | None:
    """The sum of what is said at ``addresses`` (``ip:port``); None if one of them does not say it: it may have the
    requests that count.
    """
    pages = await asyncio.gather(*(_read(http, one) for one in addresses))
    found = [one for one in pages if one is not None]
    return total(found) if len(found) == len(pages) else None


async def loads_by_pod(
    http: aiohttp.ClientSession, gateways: Iterable[Object], pods: Mapping[str, Object]
) -> dict[str, EndpointLoad]:
    """By key of ``pods``. ``gateways``: the pods with the label ``attache.dev/tells-loads``.

    A pod that no gateway knows has nothing in flight. Empty if a gateway does not answer, for then nobody knows.
    """
    known = await read_loads(http, [one for one in map(teller, gateways) if one])
    if known is None:
        return {}
    by_ip: dict[str, EndpointLoad] = {}
    for address, load in known.items():
        ip = address.rpartition(":")[0].strip("[]")
        before = by_ip.get(ip, EndpointLoad())  # data-parallel ranks of a pod have a port each
        by_ip[ip] = EndpointLoad(
            before.in_flight + load.in_flight,
            before.cached_tokens + load.cached_tokens,
            before.reported + load.reported,
        )
    return {key: by_ip.get((pod.get("status") or {}).get("podIP", ""), EndpointLoad()) for key, pod in pods.items()}


def may_have_requests(pod: Object) -> bool:
    """Whether a gateway's pod runs: one that has not started yet, or has ended, has sent nothing that is still under
    way.
    """
    return (pod.get("status") or {}).get("phase") == "Running"


def teller(pod: Object) -> str:
    """Where a gateway's pod is asked; empty while it does not run."""
    status, port = pod.get("status") or {}, (pod["metadata"].get("labels") or {}).get(LOADS_LABEL, "")
    ip = status.get("podIP")
    if not ip or not may_have_requests(pod) or not port.isdecimal():
        return ""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


async def _read(http: aiohttp.ClientSession, address: str) -> Loads | None:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    # the decoder's error is a ValueError
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, ValueError, RecursionError):
        async with http.get(f"http://{address}{LOADS_PATH}", timeout=timeout, allow_redirects=False) as answer:
            if answer.status == HTTPStatus.OK:
                return _DECODER.decode(await _whole(answer))
    return None


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """The body; ValueError if it is longer than any page of ours."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise ValueError("the page is too long")
    return bytes(body)
