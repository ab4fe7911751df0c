# SPDX-License-Identifier: Apache-2.0
"""How many tokens to reserve for a prompt, for a stored one, and for an answer without a bound.

A prompt that has not been tokenized:

    reserve = margin * (bytes / 4 + extra)

Each tenant has an estimate of its own: else one that writes what has many tokens in few bytes would make prompts of all
others too long for their limits. ``extra`` is the number of tokens that the chat template adds, learned from short
prompts. ``margin`` is the factor by which long prompts exceed what their bytes predict. Both rise at once to what an
answer reports and decay slowly, so estimates are rarely too low; what is reserved in excess is refunded.

Of a prompt that continues one that an engine has stored (``previous_response_id``) the gateway sees the end alone. It
reserves as much as 95% of the tenant's recent prompts of this kind did not exceed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import Final

_INITIAL_EXTRA: Final = 16.0
_MAX_EXTRA: Final = 512.0
_INITIAL_MARGIN: Final = 1.1
# Of one token for each byte, down to one for 16.
_MARGIN_BOUNDS: Final = (0.25, 4.0)
# The same for all, as estimates of a pool's prompts are shared by all tenants: the margin has the rest.
ASSUMED_BYTES_PER_TOKEN: Final = 4.0
# Of one pool; the least recently seen begins anew.
_MOST_TENANTS: Final = 1_000
# Prompts shorter than this teach ``extra``, the others ``margin``.
_SHORT_TOKENS: Final = 256
_DECAY: Final = 0.005
# Of the most recent ones, how many are kept, and the share of them that the reservation covers.
_RECENT: Final = 256
_COVERED: Final = 0.95
# The first guess. Mooncake's conversations and Azure's have 95% of their answers below it.
_INITIAL_TOKENS: Final = 1_000.0


class InputEstimate:
    """The estimate for one tenant's prompts to one model."""

    def __init__(self) -> None:
        self._extra = _INITIAL_EXTRA
        self._margin = _INITIAL_MARGIN
        # few tenants have any
        self._stored: TokenQuantile | None = None

    @property
    def stored_prompt_tokens(self) -> float:
        """Tokens to reserve for a prompt that continues a stored one, which may be all of it."""
        return _INITIAL_TOKENS if self._stored is None else self._stored.tokens

    def learn_stored_prompt(self, tokens: int) -> None:
        """Update that estimate from a prompt of ``tokens`` tokens, what was stored included."""
        if self._stored is None:
            self._stored = TokenQuantile()
        self._stored.learn(tokens)

    def tokens(self, prompt_bytes: int, bytes_per_token: float, *, prompts: int = 1) -> float:
        """Tokens to reserve for ``prompts`` prompts of together ``prompt_bytes`` bytes."""
        return self._margin * (prompt_bytes / bytes_per_token + prompts * self._extra)

    def learn(self, *, prompt_bytes: int, bytes_per_token: float, tokens: int, prompts: int = 1) -> None:
        """Update the estimate from ``prompts`` prompts of together ``tokens`` tokens."""
        plain = prompt_bytes / bytes_per_token
        if tokens < _SHORT_TOKENS:
            self._extra = min(_MAX_EXTRA, _rise_at_once(self._extra, max(0.0, tokens - plain) / prompts))
        else:
            low, high = _MARGIN_BOUNDS
            seen = tokens / (plain + prompts * self._extra)
            self._margin = min(high, max(low, _rise_at_once(self._margin, seen)))


class InputEstimates:
    """The estimates for the prompts of one model, by tenant."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, InputEstimate] = OrderedDict()

    def of_tenant(self, tenant: str) -> InputEstimate:
        """The tenant's own."""
        found = self._by_tenant.get(tenant)
        if found is None:
            found = self._by_tenant[tenant] = InputEstimate()
            if len(self._by_tenant) > _MOST_TENANTS:
                self._by_tenant.popitem(last=False)
        self._by_tenant.move_to_end(tenant)
        return found


def _rise_at_once(current: float, seen: float) -> float:
    return seen if seen > current else current + _DECAY * (seen - current)


class TokenQuantile:
    """The number of tokens that 95% of the recent requests did not exceed: of answers without ``max_tokens``, or of
    prompts that continue stored ones.

    A mean would grant far more than a limit while long answers are on their way; what is reserved in excess is
    refunded. The first guess counts as one request: it holds until enough others outweigh it.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque([_INITIAL_TOKENS])
        self._sorted = [_INITIAL_TOKENS]

    @property
    def tokens(self) -> float:
        """Tokens to reserve."""
        return self._sorted[math.ceil(_COVERED * len(self._sorted)) - 1]

    def learn(self, tokens: float) -> None:
        """Update the estimate from an answer or a prompt of ``tokens`` tokens."""
        if len(self._recent) == _RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(tokens)
        insort(self._sorted, tokens)
