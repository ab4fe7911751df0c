# SPDX-License-Identifier: Apache-2.0
"""Parts of names that stand for a text which no name may hold."""

from __future__ import annotations

from hashlib import sha256


def digest(text: str) -> str:
    """Eight characters."""
    return sha256(text.encode()).hexdigest()[:8]
