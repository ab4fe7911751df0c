# SPDX-License-Identifier: Apache-2.0
"""Tiers of prefix caches that a file describes by their capacity, such as host memory behind the GPU's.

llm-d's tiered prefix caches have one ``approx-prefix-cache-producer`` a tier, each with a capacity of its own, and a
scorer for each. A tier remembers what was sent to an endpoint, least recently sent first out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from extproc.prefix.index import PrefixIndex
from extproc.scheduling.bitmasks import rows_of_bitmask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.api.picker_config import EndpointPickerConfig
    from extproc.endpoints.table import Floats

_PRODUCER: Final = "approx-prefix-cache-producer"
# As in llm-d, of a producer that names no size and does not take it from the engines.
_BLOCK_TOKENS: Final = 16


def tier_capacities(config: EndpointPickerConfig) -> Mapping[str, float]:
    """Tokens that each tier holds at an endpoint, by the name of its producer.

    A producer is a tier if a plugin names it and it says its capacity itself. All others are the pool's own index.
    """
    named = {str((spec.parameters or {}).get("prefixMatchInfoProducerName")) for spec in config.plugins}
    return MappingProxyType(
        {
            spec.called: _tokens(spec.parameters or {})
            for spec in config.plugins
            if spec.type == _PRODUCER and spec.called in named and _tokens(spec.parameters or {})
        }
    )


def _tokens(parameters: Mapping[str, Any]) -> float:
    blocks, size = parameters.get("lruCapacityPerServer"), parameters.get("blockSizeTokens") or _BLOCK_TOKENS
    if parameters.get("autoTune", True) is not False or not isinstance(blocks, int) or not isinstance(size, int):
        return 0.0
    return float(max(0, blocks) * max(0, size))


class CacheTiers:
    """An index of each tier. ``capacities``: in tokens, by name."""

    def __init__(self, capacities: Mapping[str, float], *, bytes_per_token: float, first_block_bytes: int) -> None:
        self.capacities = capacities
        self._indexes = {
            name: PrefixIndex(tokens * bytes_per_token, first_block_bytes) for name, tokens in capacities.items()
        }

    def limit_blocks(self, most_blocks: int) -> None:
        """Remember no more of an endpoint, in each tier."""
        for index in self._indexes.values():
            index.most_blocks = most_blocks

    def held(self, chain: list[int], rows: int, tokens_in: Callable[[int], float]) -> Mapping[str, Floats]:
        """Tokens of ``chain`` that each endpoint holds, by tier. ``tokens_in``: so many bytes, in the engines'
        blocks.
        """
        found: dict[str, Floats] = {}
        for name, index in self._indexes.items():
            tokens = found[name] = np.zeros(rows)
            for match in index.match(chain):
                tokens[rows_of_bitmask(match.holders, rows)] = tokens_in(index.covered_bytes(match.blocks))
        return found

    def record(self, row: int, chain: list[int], now: float) -> None:
        """A prompt with ``chain`` is sent to the endpoint of ``row``."""
        for index in self._indexes.values():
            index.record(row, chain, now)

    def forget(self, row: int) -> None:
        """The endpoint of ``row`` was removed, or lost its caches."""
        for index in self._indexes.values():
            index.forget(row)
