# SPDX-License-Identifier: Apache-2.0
"""OpenAI's audio APIs: transcripts are words as many as answers have, and speech is silence of the right length."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from bench.engine.formats import Job, refused
from extproc.protocol import Api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bench.engine.request import Request

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    # a job as the finished request, or as the answer that it cannot be done
    Compute = Callable[[Job], Awaitable[Request | web.Response]]

_SAMPLE_RATE: Final = 16_000
_TOKENS_PER_S: Final = 25
_CHARACTERS_PER_S: Final = 15
_BYTES_PER_S: Final = 8_000


class SpeechRequest(msgspec.Struct):
    """POST /v1/audio/speech."""

    model: str
    input: str


def handlers(compute: Compute) -> dict[Api, Handler]:
    """How each API is answered."""

    async def speech(http: web.Request) -> web.StreamResponse:
        try:
            body = _speech.decode(await http.read())
        except msgspec.DecodeError as error:
            return refused(str(error))
        tokens = max(1, len(body.input) * _TOKENS_PER_S // _CHARACTERS_PER_S)
        done = await compute(_job(body.model, body.input.encode(), tokens))
        if isinstance(done, web.Response):
            return done
        return web.Response(body=_silence(done.produced), content_type="audio/wav")

    async def transcribe(http: web.Request) -> web.StreamResponse:
        form = await http.post()
        model, file = form.get("model"), form.get("file")
        if not isinstance(model, str) or not isinstance(file, web.FileField):
            return refused("'model' and 'file' are required")
        audio = file.file.read()
        seconds = max(1, len(audio) // _BYTES_PER_S)
        done = await compute(_job(model, audio[: 4 * _TOKENS_PER_S * seconds], None))
        if isinstance(done, web.Response):
            return done
        return web.json_response({"text": done.answer.decode(), "usage": {"type": "duration", "seconds": seconds}})

    return {Api.SPEECH: speech, Api.TRANSCRIPTIONS: transcribe}


def _job(model: str, prompt: bytes, max_tokens: int | None) -> Job:
    return Job(model=model, prompt=prompt, max_tokens=max_tokens, is_streamed=False, wants_usage=False)


def _silence(tokens: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_SAMPLE_RATE)
        out.writeframes(bytes(2 * _SAMPLE_RATE * tokens // _TOKENS_PER_S))
    return file.getvalue()


_speech: Final = msgspec.json.Decoder(SpeechRequest)
