# SPDX-License-Identifier: Apache-2.0
"""Where the command line meets the core: one decision by a configuration, and nothing else known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from extproc.api.load import load_directory
from extproc.core.core import Core
from extproc.core.explanation import Explanation, to_text
from extproc.core.record import Attachment, Head

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Explanation", "decide", "to_text"]


def decide(
    directory: Path,
    *,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    listener: str = "",
    server: str = "",
    pool: str = "",
) -> Explanation:
    """What a process that has just started with this configuration would do; raises ConfigInvalid and Refusal.

    ``listener``: that is asked. ``server``: the ModelServer that an HTTPRoute has chosen. ``pool``: that of a gateway
    that asks with the endpoint picker protocol, as the option ``--pool`` of extproc.
    """
    core = Core(load_directory(directory), rng=random.Random(), ticket_prefix="explain")
    head = Head("POST", path, headers, has_body=True, is_trusted=True, listener=listener)
    if pool and not server:
        return core.explain(core.intake.receive_pooled(pool, head, body), 0.0, attachment=Attachment(choices=1))
    return core.explain(core.intake.take(head, body, server), 0.0)
