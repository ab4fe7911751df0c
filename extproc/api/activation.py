# SPDX-License-Identifier: Apache-2.0
"""Activation: requests wait for an engine while their ModelServer has none."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import Spec


class Activation(Spec, frozen=True):
    """While no engine can take them, requests wait for the first one; without this field they are answered 503 at once.

    ``hold_timeout``: the longest that a request waits so. ``start_time``: what a start takes, for ``retry-after``,
    until one was measured. ``max_requests`` and ``max_bytes``: how many may wait in each process, and the size of their
    bodies; further ones are answered 429.
    """

    hold_timeout: Duration = Duration("10m")
    start_time: Duration = Duration("60s")
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000
    max_bytes: ByteSize = ByteSize("256Mi")
