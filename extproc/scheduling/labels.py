"""Questions about endpoints' labels and adapters, each asked of a table once until something changes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray

    from extproc.endpoints.table import Bools, EndpointTable


def rows_where(table: EndpointTable, question: Hashable, holds: Callable[[Mapping[str, str]], bool]) -> Bools:
    """Rows whose labels are such that ``holds``; ``question`` must be different for different predicates."""
    return table.cached_column(
        ("labels", question), lambda: np.fromiter((holds(one.labels) for one in table.configs), np.bool_)
    )


def has_labels(table: EndpointTable, queued: Mapping[str, str]) -> Bools:
    """Rows whose labels include all of ``wanted``."""
    return rows_where(table, tuple(sorted(queued.items())), lambda labels: queued.items() <= labels.items())


def label_groups(table: EndpointTable, key: str) -> NDArray[np.intp]:
    """A number for every row, equal for equal values of the label ``key``; a missing one is a value, too."""

    def number() -> NDArray[np.intp]:
        values = [one.labels.get(key, "") for one in table.configs]
        return np.unique(values, return_inverse=True)[1]

    return table.cached_column(("groups", key), number)


def serves_adapter(table: EndpointTable, adapter: str) -> Bools:
    """Rows whose engine said that it serves ``adapter``."""
    return table.cached_column(
        ("serves", adapter),
        lambda: np.fromiter((one.served is not None and adapter in one.served for one in table.loras), np.bool_),
    )


def has_no_model_list(table: EndpointTable) -> Bools:
    """Rows whose engine was never asked what it serves."""
    return table.cached_column("unsaid", lambda: np.fromiter((one.served is None for one in table.loras), np.bool_))


def runs_adapter(table: EndpointTable, adapter: str) -> Bools:
    """Rows whose engine has ``adapter`` in its batch now."""
    return table.cached_column(
        ("runs", adapter), lambda: np.fromiter((adapter in one.active for one in table.loras), np.bool_)
    )
