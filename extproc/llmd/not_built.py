# SPDX-License-Identifier: Apache-2.0
"""Plugin types of llm-d that are not built here, and what takes their place.

A file that names one is refused: without it the file would do something else than it says. Most are of published drafts
or of llm-d's own tests, and no release of llm-d takes them. ``reserve-endpoint`` answers a coordinator that only asks;
without it, the question would be sent to an engine.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_PAIRS: Final = "latency-scorer in both profiles of a disagg-profile-handler"

NOT_BUILT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mock-metrics-source": "nothing: it is of llm-d's own tests",
        "pd-slo-optimizer": _PAIRS,
        "pd-slo-pair-optimizer": _PAIRS,
        "pd-slo-profile-handler": "disagg-profile-handler",
        "reserve-endpoint": "disagg-profile-handler, which picks both endpoints of a pair at once",
    }
)
