# SPDX-License-Identifier: Apache-2.0
"""Whether a ModelServer has engines that requests may be sent to, by its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extproc.scheduling.labels import has_labels, label_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from extproc.api.model_server import PdGroup
    from extproc.endpoints.table import Bools, EndpointTable

    # the rows that prefill, those that decode, and the group of each row
    Stages = tuple[Bools, Bools, NDArray[np.intp]]


class Readiness(msgspec.Struct, frozen=True):
    """``can_serve``: an engine is there that is not draining; of prefill and decode engines, one that decodes.
    ``is_whole``: every stage has one, in one group. Both are the same without ``pdGroup``.

    An engine that is avoided because it has failed lately is there all the same.
    """

    can_serve: bool = False
    is_whole: bool = False


def stages_of(table: EndpointTable, group: PdGroup | None) -> Stages | None:
    """None: every endpoint does both."""
    if group is None:
        return None
    prefill, decode = has_labels(table, group.prefill_labels), has_labels(table, group.decode_labels)
    return prefill, decode, label_groups(table, group.group_key)


def readiness_of(table: EndpointTable, group: PdGroup | None) -> Readiness:
    """Of the endpoints as configured now."""
    staying = table.is_active & table.not_draining() if table.has_draining else table.is_active
    stages = stages_of(table, group)
    if stages is None:
        has_any = bool(staying.any())
        return Readiness(has_any, has_any)
    prefill, decode, groups = stages
    decoding, prefilling = staying & decode, staying & prefill
    pairs = np.intersect1d(groups[prefilling], groups[decoding])
    return Readiness(bool(decoding.any()), bool(pairs.size))
