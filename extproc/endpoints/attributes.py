# SPDX-License-Identifier: Apache-2.0
"""Metrics of engines that a configuration asks for, as columns by endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


class EngineAttributes:
    """The latest values by name and row; NaN where an engine has none. Nothing is kept unless something is recorded."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[np.float64]] = {}

    def column(self, name: str, rows: int) -> NDArray[np.float64]:
        """The values of ``rows`` endpoints."""
        known = self._columns.get(name)
        if known is None:
            return np.full(rows, np.nan)
        if known.size < rows:
            known = self._columns[name] = np.pad(known, (0, rows - known.size), constant_values=np.nan)
        return known

    def record(self, row: int, values: Mapping[str, float], rows: int) -> None:
        """What the engine of ``row`` reports, among ``rows``."""
        for name, value in values.items():
            column = self._columns[name] = self.column(name, rows)
            column[row] = value

    def forget(self, row: int) -> None:
        """The row has another endpoint now."""
        for column in self._columns.values():
            if row < column.size:
                column[row] = np.nan
