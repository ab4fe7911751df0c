# SPDX-License-Identifier: Apache-2.0
"""A table of aligned columns that fits a terminal: the least important columns are left out of a narrow one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXTS: Final = frozenset({"SERVER", "ENGINE", "STATE", "BAND", "TENANT"})
_GAP: Final = "  "


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, expendable: Sequence[str] = ()
) -> list[str]:
    """Text to the left, numbers to the right, and an empty line at the end; nothing if there are no rows.

    ``expendable``: heads of columns that are left out, one after the other, until lines are at most ``width`` long.
    """
    if not rows:
        return []
    columns = {head: [head, *(row[index] for row in rows)] for index, head in enumerate(heads)}
    widths = {head: max(map(len, cells)) for head, cells in columns.items()}
    for head in expendable:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        del widths[head]
    return [
        *(
            _GAP.join(_aligned(columns[head][index], widths[head], head) for head in widths).rstrip()
            for index in range(len(rows) + 1)
        ),
        "",
    ]


def _aligned(cell: str, width: int, head: str) -> str:
    return cell.ljust(width) if head in _TEXTS else cell.rjust(width)
