# SPDX-License-Identifier: Apache-2.0
"""Applies CustomResourceDefinitions from files and waits until the API server serves them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import yaml

from controller.kube.resources import CRDS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from controller.kube.client import Client
    from controller.kube.resources import Object

_SERVED_S: Final = 30.0
_PAUSE_S: Final = 0.05


async def apply_crds(client: Client, folders: Iterable[Path]) -> int:
    """Apply all CRDs in these folders and below, as far as they exist; how many there were.

    Raises ClusterError, and TimeoutError if one is not served after half a minute.
    """
    found = [one for folder in folders for one in await asyncio.to_thread(_crds_in, folder)]
    await asyncio.gather(*(_apply(client, one) for one in found))
    return len(found)


async def _apply(client: Client, crd: Object) -> None:
    name = crd["metadata"]["name"]
    await client.apply(CRDS, crd, force=True)
    async with asyncio.timeout(_SERVED_S):
        while not _is_served(await client.get(CRDS, name)):  # noqa: ASYNC110  the server says it by the object alone
            await asyncio.sleep(_PAUSE_S)


def _is_served(crd: Object) -> bool:
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def _crds_in(folder: Path) -> list[Object]:
    documents: list[dict[str, Any] | None] = []
    for file in sorted(folder.rglob("*.yaml")):
        documents += yaml.load_all(file.read_text(), Loader=_Loader)
    return [one for one in documents if one and one.get("kind") == CRDS.kind]


# the parser in C is ten times faster, where PyYAML was built with it
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
