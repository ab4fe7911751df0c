# SPDX-License-Identifier: Apache-2.0
"""The image that this process runs from: downloads and sidecars are of the same release."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.kube.errors import ClusterError, Forbidden
from controller.kube.resources import PODS

if TYPE_CHECKING:
    from controller.kube.client import Client

DEFAULT: Final = "attache"
_CONTAINER: Final = "manager"
_PAUSE_S: Final = 2.0

log = logging.getLogger(__name__)


async def own_image(client: Client, pod: str) -> str:
    """``pod``: the name of the pod that this may be, which is its host name. Waits for an API server that is away."""
    while True:
        try:
            found = await client.find(PODS, pod, client.access.namespace)
        except Forbidden as error:
            log.warning("the image of this pod may not be read, so engines get '%s'; set --image: %s", DEFAULT, error)
            return DEFAULT
        except ClusterError as error:
            log.warning("the image of this pod is not known yet: %s", error)
            await asyncio.sleep(_PAUSE_S)
            continue
        containers = [] if found is None else found["spec"]["containers"]
        return next((str(one["image"]) for one in containers if one["name"] == _CONTAINER), DEFAULT)
