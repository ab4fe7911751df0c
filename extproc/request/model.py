# SPDX-License-Identifier: Apache-2.0
"""A parsed request, the same for every API."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import get_args

import msgspec

from extproc.api.client_fields import InternalField, SteeringField
from extproc.request.amounts import NO_MEDIA, ONE_PROMPT, Media, Prompts

# What engines read as true: they are lenient.
_TRUE = frozenset({b"true", b'"true"', b"1"})
# Refused unless the ModelServer allows them; the others are removed.
STEERING_FIELDS: tuple[str, ...] = get_args(SteeringField)
INTERNAL_FIELDS: tuple[str, ...] = get_args(InternalField)


class Api(enum.Enum):
    """The inference APIs that are routed."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    GENERATE = "generate"
    # any other path, from a gateway whose requests all go to one pool
    UNKNOWN = "unknown"


class InferenceRequest(msgspec.Struct, frozen=True):
    """A parsed request body.

    ``prompt``: the text whose prefixes an engine caches, in the order in which a chat template writes it, so that the
    prompt of a longer conversation begins with the prompt of the shorter one. ``stream_options``: the client's, values
    undecoded.
    ``cache_salt``: vLLM's field; only prompts with the same salt share cached blocks. ``contents``: the byte span of a
    large body that holds its messages, prompt or input, for ``rewrite.with_changes``. ``max_output_tokens``: of each
    answer.
    ``answers``: how many are written, over all prompts; 0 for embeddings.
    ``internal_fields``: the INTERNAL_FIELDS that the body has.
    """

    api: Api
    model: str
    prompt: bytes
    is_streamed: bool
    stream_options: Mapping[str, msgspec.Raw]
    max_output_tokens: int | None
    cache_salt: str | None = None
    contents: tuple[int, int] | None = None
    answers: int = 1
    prompts: Prompts = ONE_PROMPT
    media: Media = NO_MEDIA
    internal_fields: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the bytes of its prompt say how many tokens it has."""
        return not self.prompts.token_ids and not self.media.tokens

    @property
    def text_bytes(self) -> int:
        """The bytes of its prompt that become tokens in proportion."""
        return 0 if self.prompts.token_ids else max(0, len(self.prompt) - self.media.size_bytes)

    @property
    def leaves_usage_out(self) -> bool:
        """Whether a streamed answer will lack token usage because the client did not ask for it.

        Streams of some APIs always end with usage, and it cannot be asked for. Counting tokens has none.
        """
        api = self.api
        # a set of enum members is looked up by Python code
        if not self.is_streamed or api is Api.RESPONSES or api is Api.MESSAGES or api is Api.COUNT_TOKENS:
            return False
        asked = self.stream_options.get("include_usage")
        return asked is None or bytes(asked) not in _TRUE

    @property
    def declines_usage(self) -> bool:
        """Whether the client says that it wants no usage, or says so in a way that engines may understand as that."""
        return "include_usage" in self.stream_options and self.leaves_usage_out

    @property
    def asks_for_usage(self) -> bool:
        """Whether its answer reports token usage without a change of the request."""
        return self.api is not Api.UNKNOWN and self.api is not Api.COUNT_TOKENS and not self.leaves_usage_out
