# SPDX-License-Identifier: Apache-2.0
"""Why parameters of llm-d's and Kthena's plugins have no effect: what replaces them here.

A plugin lists such parameters in ``WITHOUT_EFFECT``. They are accepted, so that files run unchanged, and are listed in
notes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ONE_INDEX: Final = "there is one estimate of cached prefixes, whichever producer is named"
ONE_LEDGER: Final = "load in flight is counted in one ledger, whichever producer is named"
LEARNED_LATENCY: Final = "latency is expected by learned prefill rates, whichever producer is named"
NEVER_USED: Final = "llm-d does not use it either"
NEVER_READ: Final = "no release of llm-d reads it"
INDEX_SIZE: Final = "the index belongs to the pool and takes its size from what engines report"
NO_ENCODE_STAGE: Final = "there is no encode stage; the engines of the other stages encode media themselves"
RANKS_ARE_ENDPOINTS: Final = "each port of a pod is an endpoint of its own"
ONE_SOURCE: Final = "attributes are the customMetrics of a core-metrics-extractor, whichever producer is named"
KV_EVENTS: Final = "the ModelServer's kvEvents configure the precise index"

# Of prefix scorers, in all the releases of llm-d and Kthena that had them.
INDEX_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "autoTune",
                "blockSize",
                "blockSizeTokens",
                "hashBlockSize",
                "lruCapacityPerServer",
                "maxPrefixBlocksToMatch",
                "maxPrefixTokensToMatch",
                "blockSizeToHash",
                "maxBlocksToMatch",
                "maxHashCacheSize",
                "topKMatches",
            ),
            INDEX_SIZE,
        ),
        **dict.fromkeys(("mode", "indexerConfig", "kvEventsConfig", "tokenProcessorConfig"), KV_EVENTS),
    }
)
