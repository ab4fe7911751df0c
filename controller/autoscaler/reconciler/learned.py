# SPDX-License-Identifier: Apache-2.0
"""What was learned of a binding's targets, kept in an annotation of the binding for the next leader."""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Final

from controller.autoscaler.reconciler.scalables import LEARNED
from controller.kube.resources import AUTOSCALING_POLICY_BINDINGS, split_key

if TYPE_CHECKING:
    from random import Random

    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.kube.client import Client

# An object's annotations share 256 KiB.
_MOST_BYTES: Final = 65_536
_FIRST_S: Final = 60.0
_LONGEST_S: Final = 3600.0
# Of what a leader before has kept.
_MOST_FIRST_S: Final = 600.0


def packed(kept: bytes) -> str:
    """As the annotation has it; empty if it would be too long."""
    text = base64.b64encode(zlib.compress(kept)).decode() if kept else ""
    return text if len(text) <= _MOST_BYTES else ""


def unpacked(text: str) -> bytes:
    """What was packed; empty for what is nothing of ours."""
    try:
        reader = zlib.decompressobj()
        return reader.decompress(base64.b64decode(text, validate=True), 1_000_000)
    except (ValueError, zlib.error):
        return b""


class Keeping:
    """Writes it where it is new: a binding at most a minute after the last time, then two, four, and so on up to an
    hour.

    Speeds change a little all the time, and early changes are the largest. What a leader before has kept is good enough
    for the first minutes, in which a new one has enough to write. Times are drawn at random, so that bindings that
    began together do not write together.
    """

    def __init__(self, client: Client, rng: Random) -> None:
        self._client = client
        self._rng = rng
        # when to look again, what was written, and how long to wait after the next time
        self._written: dict[str, tuple[float, str, float]] = {}

    def is_due(self, view: BindingView, now_s: float) -> bool:
        """Whether ``keep`` would look at all: packing costs something."""
        known = self._written.get(view.key)
        if known is None and view.learned:
            first_s = self._rng.uniform(_FIRST_S, _MOST_FIRST_S)
            known = self._written[view.key] = now_s + first_s, view.learned, _MOST_FIRST_S
        return known is None or now_s >= known[0]

    async def keep(self, view: BindingView, kept: bytes, now_s: float) -> None:
        """Raises ClusterError."""
        _, before, wait_s = self._written.get(view.key, (0.0, view.learned, _FIRST_S))
        text = packed(kept)
        if not text or text == before:
            self._written[view.key] = now_s + self._about(_FIRST_S), before, wait_s
            return
        self._written[view.key] = now_s + self._about(wait_s), text, min(_LONGEST_S, 2 * wait_s)
        namespace, name = split_key(view.key)
        metadata = {"uid": view.claim.uid, "annotations": {LEARNED: text}}
        await self._client.merge_patch(AUTOSCALING_POLICY_BINDINGS, name, namespace, {"metadata": metadata})

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._written.pop(key, None)

    def _about(self, wait_s: float) -> float:
        return wait_s * self._rng.uniform(0.5, 1.0)
