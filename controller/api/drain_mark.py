# SPDX-License-Identifier: Apache-2.0
"""The mark of pods that drain, at which gateways send them nothing new, and when pods that have it may be deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Annotation of a pod, RFC 3339: since when it gets no new requests, because it is going to be deleted.
DRAINING: Final = "attache.dev/draining"
# The same, written by people: "true".
DRAIN: Final = "attache.dev/drain"
# Annotation of a pod: the controllers of Deployments delete pods with a lower cost first.
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
# Until every gateway has received the mark, and the last request on its way is counted.
HEARD_S: Final = 3.0


def drain_recheck_at(
    marked_s: Sequence[float | None], *, is_idle: bool, now_s: float, drain_s: float, each_s: float
) -> float | None:
    """When to look again at pods that go together; None: they may go now.

    ``marked_s``: since when each has the mark; None: it is marked now. ``is_idle``: whether all are known to have no
    requests. ``drain_s``: the longest wait for requests in flight. ``each_s``: how often to look until then.
    """
    if not marked_s or drain_s <= 0:
        return None
    known = [one for one in marked_s if one is not None]
    if len(known) < len(marked_s):
        return now_s + HEARD_S
    last_s = max(known)
    if now_s >= last_s + drain_s or (is_idle and now_s >= last_s + HEARD_S):
        return None
    return min(last_s + drain_s, now_s + each_s)
