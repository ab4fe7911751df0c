# SPDX-License-Identifier: Apache-2.0
"""Bodies of OpenAI's audio APIs. Engines do not report their tokens, so limits count seconds: 25 tokens each."""

from __future__ import annotations

from math import ceil
from typing import Final

import msgspec

from extproc.protocol import Api
from extproc.request.model import MOST_TOKENS, Common, InferenceRequest, large_contents, opened, request_of

# Of Qwen2-Audio; the codecs of speech models have 12 to 83.
TOKENS_PER_S: Final = 25
# Of speech: 150 words a minute, of six characters each.
_CHARACTERS_PER_S: Final = 15


class _Speech(Common, kw_only=True, gc=False):
    input: msgspec.Raw


def speech(body: bytes) -> InferenceRequest:
    """POST /v1/audio/speech: its answer is as long as its text takes to be spoken."""
    asked = _speech.decode(body)
    seconds = memoryview(asked.input).nbytes / _CHARACTERS_PER_S
    most = min(MOST_TOKENS, ceil(seconds * TOKENS_PER_S))
    return request_of(Api.SPEECH, asked, bytes(opened(asked.input)), most, large_contents(asked.input, body))


_speech: Final = msgspec.json.Decoder(_Speech)
