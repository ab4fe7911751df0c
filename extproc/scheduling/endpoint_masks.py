# SPDX-License-Identifier: Apache-2.0
"""Rows of an endpoint table by labels and adapters, as masks that are cached; which stages and revisions there are."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extproc.wire_names import REVISION_LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from numpy.typing import NDArray

    from extproc.api.model_server import PdGroup
    from extproc.endpoints.table import Bools, EndpointTable


def rows_where(table: EndpointTable, key: Hashable, holds: Callable[[Mapping[str, str]], bool]) -> Bools:
    """The rows for whose labels ``holds`` is true. ``key``: identifies the predicate in the cache."""
    return table.cached_column(
        ("labels", key), lambda: np.fromiter((holds(one.labels) for one in table.configs), np.bool_)
    )


def rows_with_labels(table: EndpointTable, required: Mapping[str, str]) -> Bools:
    """The rows whose labels include all ``required`` ones."""
    return rows_where(table, tuple(sorted(required.items())), lambda labels: required.items() <= labels.items())


def label_values(table: EndpointTable, key: str) -> NDArray[np.object_]:
    """The value of the label ``key`` for each row, None where it is missing."""
    return table.cached_column(
        ("values", key), lambda: np.array([one.labels.get(key) for one in table.configs], np.object_)
    )


def label_groups(table: EndpointTable, key: str) -> NDArray[np.intp]:
    """A group number for each row: equal for equal values of the label ``key``; a missing label is a value, too."""

    def number() -> NDArray[np.intp]:
        values = [one.labels.get(key, "") for one in table.configs]
        return np.unique(values, return_inverse=True)[1]

    return table.cached_column(("groups", key), number)


def rows_serving_adapter(table: EndpointTable, adapter: str) -> Bools:
    """The rows whose engine lists ``adapter`` among its models."""
    return table.cached_column(
        ("serves", adapter),
        lambda: np.fromiter((one.served is not None and adapter in one.served for one in table.loras), np.bool_),
    )


def rows_without_model_list(table: EndpointTable) -> Bools:
    """The rows whose engine's list of models has not been read."""
    return table.cached_column("unsaid", lambda: np.fromiter((one.served is None for one in table.loras), np.bool_))


def rows_running_adapter(table: EndpointTable, adapter: str) -> Bools:
    """The rows whose engine has ``adapter`` in its current batch."""
    return table.cached_column(
        ("runs", adapter), lambda: np.fromiter((adapter in one.active for one in table.loras), np.bool_)
    )


def revision_set_key(engines: Iterable[Mapping[str, str]]) -> str:
    """Another text for any other set of revisions that engines with these labels are of; empty if none has one."""
    found = {next((one[name] for name in REVISION_LABELS if name in one), "") for one in engines}
    return sha256(msgspec.json.encode(sorted(found))).hexdigest()[:16] if any(found) else ""


class PoolReadiness(msgspec.Struct, frozen=True):
    """``can_serve``: an engine is there that is not draining; of prefill and decode engines, one that decodes.
    ``is_whole``: every stage has one, in one group. Both are the same without ``pdGroup``.

    An engine that is avoided because it has failed lately is there all the same.
    """

    can_serve: bool = False
    is_whole: bool = False


def prefill_decode_rows(table: EndpointTable, group: PdGroup | None) -> tuple[Bools, Bools, NDArray[np.intp]] | None:
    """The rows that prefill, those that decode, and the group of each row; None: every endpoint does both."""
    if group is None:
        return None
    prefill, decode = rows_with_labels(table, group.prefill_labels), rows_with_labels(table, group.decode_labels)
    return prefill, decode, label_groups(table, group.group_key)


def readiness_of(table: EndpointTable, group: PdGroup | None) -> PoolReadiness:
    """Of the endpoints as configured now."""
    staying = table.is_active & table.rows_not_draining() if table.has_draining else table.is_active
    stages = prefill_decode_rows(table, group)
    if stages is None:
        has_any = bool(staying.any())
        return PoolReadiness(has_any, has_any)
    prefill, decode, groups = stages
    decoding, prefilling = staying & decode, staying & prefill
    pairs = np.intersect1d(groups[prefilling], groups[decoding])
    return PoolReadiness(bool(decoding.any()), bool(pairs.size))
