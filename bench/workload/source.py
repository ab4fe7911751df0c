# SPDX-License-Identifier: Apache-2.0
"""A workload by the name of a generator or the file of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.workload.generators import GENERATORS, generate
from bench.workload.traces import read_trace

if TYPE_CHECKING:
    from bench.workload.sessions import Workload
    from bench.workload.traces import Excerpt


def load_workload(source: str, excerpt: Excerpt, *, trace_format: str | None = None, seed: int = 0) -> Workload:
    """``source``: the path of a trace, or a generator as in ``chat:sessions=30``. Raises TraceInvalid.

    ``trace_format``: of a trace; None: by its file name. ``seed``: of a generator.
    """
    if source.partition(":")[0] in GENERATORS:
        return generate(source, seed, excerpt)
    return read_trace(Path(source), excerpt, trace_format)
