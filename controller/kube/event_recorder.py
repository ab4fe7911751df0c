# SPDX-License-Identifier: Apache-2.0
"""Writes Events of objects; those with the same reason at most once a minute."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

from controller.kube.api_resources import EVENTS, Object, key_of, timestamp_of
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.kube.client import Client
    from controller.kube.reconcile_plan import KubeEvent

log = logging.getLogger(__name__)

_LONGEST = 1024
Counted = Callable[[str, str], None]
"""Gets the kind and the verb of each write."""
_QUIET_S: Final = 60.0
_REMEMBERED: Final = 4096


def make_event(
    thing: Object, type_: Literal["Normal", "Warning"], *, reason: str, message: str, component: str
) -> Object:
    """An Event of ``thing``, to be created."""
    metadata, written = thing["metadata"], timestamp_of(datetime.now(UTC).timestamp())
    namespace = metadata.get("namespace", "")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # the API requires this namespace where the object has none
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace or "default"},
        "involvedObject": {
            "apiVersion": thing["apiVersion"],
            "kind": thing["kind"],
            "name": metadata["name"],
            "namespace": namespace,
            "uid": metadata.get("uid", ""),
        },
        "type": type_,
        "reason": reason,
        "message": message[:_LONGEST],
        "source": {"component": component},
        "firstTimestamp": written,
        "lastTimestamp": written,
        "count": 1,
    }


class EventRecorder:
    """Writes Events. ``clock``: seconds that only grow."""

    def __init__(self, client: Client, component: str, clock: Callable[[], float], counted: Counted) -> None:
        self._client = client
        self._component = component
        self._clock = clock
        self._counted = counted
        # when an Event was last written, by the object's uid and its reason, and how many came since; the oldest go
        self._written: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    async def record_events(self, thing: Object, events: Iterable[KubeEvent]) -> None:
        """An Event that cannot be written is logged: nothing depends on it."""
        for one in events:
            left_out = self._left_out((thing["metadata"]["uid"], one.reason))
            if left_out is None:
                continue
            message = f"{one.message} (and {left_out} more since the last such Event)" if left_out else one.message
            event = make_event(thing, one.type, reason=one.reason, message=message, component=self._component)
            try:
                await self._client.create(EVENTS, event)
                self._counted(EVENTS.kind, "create")
            except ClusterError as error:
                log.info("the Event %s of %s is not written: %s", one.reason, key_of(thing), error)

    def _left_out(self, about: tuple[str, str]) -> int | None:
        """How many were left out since the last one; None if this one is, too."""
        written_s, left_out = self._written.get(about, (None, 0))
        now_s = self._clock()
        if written_s is not None and now_s < written_s + _QUIET_S:
            self._written[about] = written_s, left_out + 1
            return None
        self._written[about] = now_s, 0
        self._written.move_to_end(about)
        while len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)
        return left_out
