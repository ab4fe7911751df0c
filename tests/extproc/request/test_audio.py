# SPDX-License-Identifier: Apache-2.0
"""What bodies of audio APIs ask for."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

from extproc.refusals import BadRequest
from extproc.request.body_parser import parse_body
from extproc.wire_names import Api
from tests.fuzz.mutants import content_of

if TYPE_CHECKING:
    from extproc.request.inference_request import InferenceRequest


def test_speech_is_as_long_as_its_text() -> None:
    text = "a" * 298
    asked = parse_body(Api.SPEECH, json.dumps({"model": "m", "input": text, "voice": "alloy"}).encode())
    assert asked.prompt == f'"{text}'.encode()
    # 300 characters with their quotes: 20 seconds
    assert (asked.answers, asked.max_output_tokens) == (1, 500)
    assert not asked.reports_usage_unchanged


def wav(seconds: int, *, samples_per_s: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    """With a header that may lie: there are ``seconds`` of one channel of 16 bits at 16 kHz."""
    head = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", 0, b"WAVEfmt ", 16, 1, channels, samples_per_s, 0, 0, bits, b"data", 0
    )
    return head + bytes(range(250)) * (seconds * 128)


def transcription(file: bytes, **fields: object) -> InferenceRequest:
    content, content_type = content_of(Api.TRANSCRIPTIONS, {"model": "m", **fields, "file": file})
    return parse_body(Api.TRANSCRIPTIONS, content, {"content-type": content_type})


def test_audio_counts_by_its_seconds() -> None:
    asked = transcription(wav(10))
    assert asked.media.tokens == pytest.approx(250, abs=1)
    assert asked.text_bytes == 0
    assert len(asked.prompt) == 4 * asked.media.tokens
    # of other formats, by their bytes
    assert transcription(b"OggS" + bytes(79_996)).media.tokens == 250
    assert transcription(b"").media.tokens == 0


def test_no_header_makes_audio_cost_nothing() -> None:
    for header in ({"samples_per_s": 2**32 - 1}, {"channels": 65_535}, {"bits": 65_535}, {"samples_per_s": 0}):
        assert transcription(wav(100, **header)).media.tokens >= 50, header


def test_the_same_audio_is_the_same_prefix() -> None:
    one, other = transcription(wav(10)), transcription(wav(10), language="en")
    assert one.prompt == other.prompt
    assert transcription(b"Ogg" + wav(10)).prompt != one.prompt


def test_text_beside_audio_counts_as_text() -> None:
    asked = transcription(wav(10), prompt="The words are: engine, prefix.")
    assert asked.prompt.startswith(b"The words are")
    assert asked.text_bytes == 30


def test_what_a_transcript_may_have_at_most() -> None:
    assert transcription(wav(1)).max_output_tokens is None
    assert transcription(wav(1), max_completion_tokens=7).max_output_tokens == 7
    for wrong in ("0", "-1", "many", "1.5", "9" * 30):
        with pytest.raises(BadRequest) as caught:
            transcription(wav(1), max_completion_tokens=wrong)
        assert caught.value.param == "max_completion_tokens"


def test_a_transcription_needs_a_file() -> None:
    for fields in ({"model": "m"}, {"model": "m", "file": "text"}):
        content, content_type = content_of(Api.TRANSCRIPTIONS, fields)
        with pytest.raises(BadRequest) as caught:
            parse_body(Api.TRANSCRIPTIONS, content, {"content-type": content_type})
        assert caught.value.param == "file"


def test_what_vllm_passes_on_is_looked_into() -> None:
    assert transcription(wav(1), vllm_xargs='{"kv_transfer_params": {}}').internal_fields == ("kv_transfer_params",)
    with pytest.raises(BadRequest):
        transcription(wav(1), vllm_xargs='{"kv_transfer_params": NaN}')
