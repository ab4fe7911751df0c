# SPDX-License-Identifier: Apache-2.0
"""Host names with wildcards, as the Gateway API compares them."""

from __future__ import annotations

from typing import Final

# All hosts.
ANY_HOST: Final = "*"


def covers(pattern: str, domain: str) -> bool:
    """Whether all hosts of ``domain`` are hosts of ``pattern``. A wildcard stands for one label or more."""
    if ANY_HOST in (pattern, domain):
        return pattern == ANY_HOST
    return pattern == domain or (pattern.startswith("*.") and domain.endswith(pattern[1:]))


def have_common_hosts(one: str, other: str) -> bool:
    """Whether a host can belong to both."""
    return covers(one, other) or covers(other, one)
