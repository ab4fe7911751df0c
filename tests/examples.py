# SPDX-License-Identifier: Apache-2.0
"""How many examples tests try where one takes long: all of them in ``make test-all``, a fifth of them elsewhere.

There hypothesis tries other examples every time; in CI it tries the same ones.
"""

from __future__ import annotations

import os
from typing import Final

IS_CI: Final = bool(os.environ.get("CI"))
# what is marked slow runs, too
IS_SLOW: Final = bool(os.environ.get("SLOW"))
_PART: Final = 5


def examples(of_all: int) -> int:
    """How many examples to try: ``of_all``, or a fifth of them."""
    return of_all if IS_SLOW else max(of_all // _PART, 5)
