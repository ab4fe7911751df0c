# SPDX-License-Identifier: Apache-2.0
"""How many file descriptors a process may have"""

from __future__ import annotations

import math
import resource


def hard_limit() -> float:
    """What this process may raise its limit to."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return math.inf if hard == resource.RLIM_INFINITY else hard


def raise_limit() -> float:
    """Raise the soft limit to the hard one, and return it: shells and systemd begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard_limit()
