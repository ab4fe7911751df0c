# SPDX-License-Identifier: Apache-2.0
"""Headers by what HTTP means by them, whoever sends them."""

from __future__ import annotations

from typing import Final

# Of a connection, not of a message: no relay passes them on, and none is configured for a message.
HOP_BY_HOP: Final = frozenset(
    {"connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
