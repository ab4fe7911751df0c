# SPDX-License-Identifier: Apache-2.0
"""How many examples hypothesis tries where one takes long: all of them in CI, a fifth of them elsewhere."""

from __future__ import annotations

import os
from typing import Final

IS_CI: Final = bool(os.environ.get("CI"))


def examples(in_ci: int) -> int:
    """For ``max_examples``."""
    return in_ci if IS_CI else max(in_ci // 5, 5)
