# SPDX-License-Identifier: Apache-2.0
"""Drains Envoy on demand: whoever is about to stop it creates a file, and waits until the file is gone."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from controller.bundle.envoy_admin_client import fail_health_check, running_requests

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)
_POLL_S: Final = 0.2
# How long load balancers have to notice, which still send requests.
_SETTLE_S: Final = 5.0


def drain_on_demand(
    file: Path, addresses: Callable[[], Sequence[str]], stop: threading.Event, *, settle_s: float = _SETTLE_S
) -> None:
    """Until ``stop``: whenever ``file`` is there, drain Envoy and remove the file. ``addresses``: of its admin
    interface; the first that answers is used.
    """
    while not stop.wait(_POLL_S):
        if file.exists():
            _drain(addresses(), stop, settle_s)
            file.unlink(missing_ok=True)


def _drain(addresses: Sequence[str], stop: threading.Event, settle_s: float) -> None:
    """Have Envoy close each connection after its answer; return when it has no request."""
    admin = next((one for one in addresses if fail_health_check(one)), None)
    if admin is None:
        log.warning("no Envoy to drain answers at %s", " or ".join(addresses) or "any address")
        return
    log.info("Envoy drains")
    clock = time.monotonic  # noqa: TID251 - the edge
    began_s = clock()
    while not stop.wait(_POLL_S) and (clock() < began_s + settle_s or running_requests(admin) > 0):
        pass
    log.info("Envoy has drained in %.1f s", clock() - began_s)
