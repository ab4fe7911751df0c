# SPDX-License-Identifier: Apache-2.0
"""A parsed request, the same for every API."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec


class Api(enum.Enum):
    """The inference APIs that are routed."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    # any other path, from a gateway whose requests all go to one pool
    UNKNOWN = "unknown"


class InferenceRequest(msgspec.Struct, frozen=True):
    """A parsed request body.

    ``prompt``: the text whose prefixes an engine caches, in the order in which a chat template writes it, so that the prompt
    of a longer conversation begins with the prompt of the shorter one. ``stream_options``: the client's, values undecoded.
    ``cache_salt``: vLLM's field; only prompts with the same salt share cached blocks. ``contents``: the byte span of a large
    body that holds its messages, prompt or input, for ``rewrite.with_changes``.
    """

    api: Api
    model: str
    prompt: bytes
    is_streamed: bool
    stream_options: Mapping[str, msgspec.Raw]
    max_output_tokens: int | None
    cache_salt: str | None = None
    contents: tuple[int, int] | None = None

    @property
    def leaves_usage_out(self) -> bool:
        """Whether a streamed answer will lack token usage because the client did not say whether it wants it."""
        asks = self.api is Api.RESPONSES or "include_usage" in self.stream_options
        return self.is_streamed and not asks

    @property
    def asks_for_usage(self) -> bool:
        """Whether its answer reports token usage without a change of the request."""
        if self.api is Api.UNKNOWN:
            return False
        wish = self.stream_options.get("include_usage")
        return not self.is_streamed or self.api is Api.RESPONSES or (wish is not None and bytes(wish) == b"true")
