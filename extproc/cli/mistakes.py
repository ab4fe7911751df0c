# SPDX-License-Identifier: Apache-2.0
"""How the command line reports a configuration that cannot be used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.api.errors import ConfigInvalid


def report(error: ConfigInvalid) -> int:
    """Print every mistake and their number to standard error; returns the exit status."""
    print(error, file=sys.stderr)
    print(counted(len(error.mistakes), "mistake"), file=sys.stderr)
    return 2


def counted(number: int, noun: str) -> str:
    """``1 mistake``, ``2 mistakes``, ``2 policies``."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"
