# SPDX-License-Identifier: Apache-2.0
"""Kinds that a cluster may lack: waiting until it serves them, without holding up what can do without."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.resources import Resource

log = logging.getLogger(__name__)


async def until_served(client: Client, resource: Resource, missing: asyncio.Event, look_again_s: float) -> None:
    """Returns once the server knows the kind. ``missing`` is set once it has said that it does not."""
    while True:
        try:
            if await client.serves(resource):
                return
            missing.set()
        except ClusterError as error:
            log.info("%s cannot be looked for: %s", resource.kind, error)
        await asyncio.sleep(look_again_s)


async def first_of(one: asyncio.Event, other: asyncio.Event) -> None:
    """Returns once either is set."""
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(event.wait()) for event in (one, other)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
