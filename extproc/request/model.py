"""What the gateway knows of a request, whatever API it came by."""

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
    # something else that a gateway sends to its engines
    UNKNOWN = "unknown"


class InferenceRequest(msgspec.Struct, frozen=True):
    """A parsed request body.

    ``prompt`` is the text whose prefixes an engine caches, in the order in which a chat template writes it: a longer
    conversation extends the prompt of a shorter one. ``stream_options`` are the client's, undecoded.
    """

    api: Api
    model: str
    prompt: bytes
    is_streamed: bool
    stream_options: Mapping[str, msgspec.Raw]
    max_output_tokens: int | None
    # vLLM's field of that name: only prompts with the same salt share cached blocks
    cache_salt: str | None = None

    @property
    def leaves_usage_out(self) -> bool:
        """Whether a streamed answer will carry no usage because nobody asked; an explicit no is the client's word."""
        asks = self.api is Api.RESPONSES or "include_usage" in self.stream_options
        return self.is_streamed and not asks
