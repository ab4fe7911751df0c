"""A trace's file or a generator's name to a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.workload.generators import GENERATORS, generate
from bench.workload.traces import Part, read_trace

if TYPE_CHECKING:
    from bench.lab.trial import Conditions
    from bench.workload.sessions import Workload


def load_workload(conditions: Conditions) -> Workload:
    """Raises TraceInvalid. ``limit`` 0: all of a trace, as much as a generator makes by itself."""
    name = conditions.trace.partition(":")[0]
    if name in GENERATORS:
        return generate(conditions.trace, conditions.seed, Part(conditions.skip, conditions.limit))
    return read_trace(Path(conditions.trace), Part(conditions.skip, conditions.limit), conditions.trace_format)
