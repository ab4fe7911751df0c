# SPDX-License-Identifier: Apache-2.0
"""Plugin types of llm-d that are not built here, and what takes their place.

A file that names one is refused: without it the file would do something else than it says. No release of llm-d takes
these: they are of drafts that were published, or of llm-d's own tests.
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
    }
)
