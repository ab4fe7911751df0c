# SPDX-License-Identifier: Apache-2.0
"""What bodies of audio APIs ask for."""

from __future__ import annotations

import json

from extproc.protocol import Api
from extproc.request.parsing import parse


def test_speech_is_as_long_as_its_text() -> None:
    text = "a" * 298
    asked = parse(Api.SPEECH, json.dumps({"model": "m", "input": text, "voice": "alloy"}).encode())
    assert asked.prompt == f'"{text}'.encode()
    # 300 characters with their quotes: 20 seconds
    assert (asked.answers, asked.max_output_tokens) == (1, 500)
    assert not asked.asks_for_usage
