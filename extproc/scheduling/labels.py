# SPDX-License-Identifier: Apache-2.0
"""Masks of rows by endpoint labels and adapters, cached until these change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray

    from extproc.endpoints.table import Bools, EndpointTable


def rows_where(table: EndpointTable, key: Hashable, holds: Callable[[Mapping[str, str]], bool]) -> Bools:
    """The rows for whose labels ``holds`` is true. ``key``: identifies the predicate in the cache."""
    return table.cached_column(
        ("labels", key), lambda: np.fromiter((holds(one.labels) for one in table.configs), np.bool_)
    )


def has_labels(table: EndpointTable, required: Mapping[str, str]) -> Bools:
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


def serves_adapter(table: EndpointTable, adapter: str) -> Bools:
    """The rows whose engine lists ``adapter`` among its models."""
    return table.cached_column(
        ("serves", adapter),
        lambda: np.fromiter((one.served is not None and adapter in one.served for one in table.loras), np.bool_),
    )


def has_no_model_list(table: EndpointTable) -> Bools:
    """The rows whose engine has not been asked for its list of models."""
    return table.cached_column("unsaid", lambda: np.fromiter((one.served is None for one in table.loras), np.bool_))


def runs_adapter(table: EndpointTable, adapter: str) -> Bools:
    """The rows whose engine has ``adapter`` in its current batch."""
    return table.cached_column(
        ("runs", adapter), lambda: np.fromiter((adapter in one.active for one in table.loras), np.bool_)
    )
