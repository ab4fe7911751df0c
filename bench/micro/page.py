# SPDX-License-Identifier: Apache-2.0
"""The README's table of costs, as Markdown, from the figures of a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.micro.figures import BASELINE, EXTPROC
from bench.micro.overhead import BUSY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from bench.micro.figures import ServerFigures

_ANSWERING: Final = "answering"
_GATEWAY: Final = "SGLang's gateway"
_HEAD: Final = """\
| | added latency, ms | | | | requests/s, of the no-op's | | CPU of a request, µs | | |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| prompt, endpoints | no-op | answering | extproc | SGLang's gateway | answering | extproc | no-op | answering | extproc |
"""  # noqa: E501 - a line of a table


def markdown(found: Iterable[ServerFigures]) -> str:
    """One line for each case."""
    cases: dict[str, dict[str, ServerFigures]] = {}
    for one in found:
        cases.setdefault(one.case, {})[one.server] = one
    return _HEAD + "".join(f"| {case} | {' | '.join(_cells(servers))} |\n" for case, servers in cases.items())


def _cells(servers: Mapping[str, ServerFigures]) -> Iterator[str]:
    for name in (BASELINE, _ANSWERING, EXTPROC, _GATEWAY):
        yield f"{servers[name].added_p50_ms.median:.2f}" if name in servers else ""
    for name in (_ANSWERING, EXTPROC):
        yield f"{servers[name].phases[BUSY.name].rate_ratio.median:.2f}" if name in servers else ""
    for name in (BASELINE, _ANSWERING, EXTPROC):
        yield f"{servers[name].phases[BUSY.name].cpu_us:,.0f}" if name in servers else ""
