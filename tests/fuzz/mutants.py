# SPDX-License-Identifier: Apache-2.0
"""Requests that are broken in bytes, in JSON's structure, in headers or on the way, and valid ones to start from."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from bench.stack.loopback_stack import ALIAS
from extproc.wire_names import APIS_BY_PATH, Api
from tests.fuzz.values import broken, changed

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

_WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
_MULTIPART: Final = (
    b'--cut\r\ncontent-disposition: form-data; name="model"\r\n\r\nllama\r\n--cut\r\ncontent-disposition: form-data; '
    b'name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\nRIFF$\0\0\0WAVEfmt \x10\0\0\0\r\n--cut--\r\n'
)
# In place of any value.
ODD_VALUES: Final[tuple[bytes, ...]] = (
    *(b"null", b"true", b"false", b'""', b"[]", b"{}", b"0", b"-1", b"-0", b"0.5", b"1e400", b"-1e308", b"1E+2"),
    *(b"9" * 400, b"-" + b"9" * 30, b"9007199254740993", b"2147483648", b"-2147483649", b"1" + b"0" * 30 + b".5"),
    *(b"NaN", b"Infinity", b"-Infinity", b"0x10", b"01", b"1.", b".5", b"+1", b"1_000", b"undefined", b"'a'"),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\\x41"'),
    *(b'"' + b"a" * 70_000 + b'"', b'"' + b"\\n" * 10_000 + b'"', b'"\n"', b'"\xf0\x9f\x98\x80"', b'"llama"'),
    *(b"[" * 100 + b"]" * 100, b"[" * 20_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"[" + b"{}," * 40_000 + b"{}]"),
    *(b"[0," * 300 + b"0" + b"]" * 300, b"[" + b"1," * 50_000 + b"1]", b'{"":""}', b'{"role":"user","content":null}'),
)
# Anywhere between bytes.
SPECIAL: Final[tuple[bytes, ...]] = (
    *(b"\xef\xbb\xbf", b"\0", b"\xff", b"\xc3", b"\xe2\x80\xa8", b"\x1b[2J", b"\x7f", b"\r\n", b"\r\n\r\n", b"\x85"),
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\\u", b"//", b"/* */", b"#", b"--cut--", b"data: [DONE]\n\n"),
)
# Fields that steer something, added beside the others.
FIELDS: Final = (
    *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "best_of", "priority", "user"),
    *("kv_transfer_params", "bootstrap_host", "data_parallel_rank", "cache_salt", "request_id", "lora_request"),
    *("messages", "prompt", "input", "", "__proto__", "a" * 1000, "mod\u200bel", "Model"),
)
ODD_HEADERS: Final[tuple[tuple[str, str], ...]] = (
    *(("content-encoding", one) for one in ("gzip", "deflate", "br", "identity", "gzip, gzip", "x")),
    *(("content-type", one) for one in ("text/plain", "", "application/json; charset=utf-16", "a" * 500, "/")),
    *(("accept", "text/event-stream"), ("accept-encoding", "gzip"), ("expect", "100-continue"), ("te", "trailers")),
    *(("authorization", "Bearer x"), ("authorization", ""), ("x-request-id", "a" * 5000), ("cookie", "a=b; " * 500)),
    *(("x-attache-tenant", "t"), ("x-attache-server", "default/llama"), ("x_attache_server", "default/llama")),
    *(("x-envoy-upstream-rq-timeout-ms", "1"), ("x-envoy-max-retries", "100"), ("x-data-parallel-rank", "7")),
    *(("x-gateway-destination-endpoint", "127.0.0.1:1"), ("x-session-id", "\xff\xfe"), ("x-slo-ttft-ms", "-1")),
    *(("x-llm-d-inference-objective", "a" * 3000), ("forwarded", "for=_x"), ("traceparent", "00-0-0-0")),
)
# Window of a new HTTP/2 connection, less something: larger bodies go over HTTP/1.1.
_MOST_BY_HTTP2: Final = 60_000
_PLACEHOLDER: Final = "\ue000"
Transport = Literal["length", "chunked", "http2"]
_TRANSPORTS: Final[tuple[Transport, ...]] = ("length", "length", "chunked", "http2")


class Seed(msgspec.Struct, frozen=True):
    """One valid request. ``body``: JSON as plain data, or other content as bytes."""

    path: str
    body: object = b""
    method: str = "POST"
    content_type: str = "application/json"


def _chat_fields(text: object, **fields: object) -> dict[str, object]:
    return {"model": ALIAS, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}


def content_of(api: Api, fields: Mapping[str, object]) -> tuple[bytes, str]:
    """A body with these fields, and its content type."""
    if api.spec.body == "json":
        return msgspec.json.encode(fields), "application/json"
    parts = []
    for name, value in fields.items():
        more = '; filename="a.wav"\r\ncontent-type: audio/wav' if isinstance(value, bytes) else ""
        parts.append(f'--cut\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode())
        parts.append(value if isinstance(value, bytes) else str(value).encode())
        parts.append(b"\r\n")
    return b"".join((*parts, b"--cut--\r\n")), "multipart/form-data; boundary=cut"


def _plain(value: object) -> object:
    """As it comes out of JSON: lists are lists."""
    return msgspec.json.decode(msgspec.json.encode(value))


SEEDS: Final = (
    *(
        Seed(path, _plain({"model": ALIAS, **api.spec.example}))
        for path, api in APIS_BY_PATH.items()
        if api.spec.body == "json"
    ),
    Seed("/v1/chat/completions", _chat_fields("hello", stream=True, stream_options={"include_usage": True}, n=1)),
    Seed(
        "/v1/chat/completions",
        _chat_fields(
            [
                {"type": "text", "text": "what is this?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            ],
            tools=[_WEATHER],
            temperature=0.5,
            logit_bias={"50256": -100},
        ),
    ),
    Seed("/v1/completions", {"model": ALIAS, "prompt": "once upon", "max_tokens": 3, "stop": ["\n"], "best_of": 1}),
    Seed("/v1/completions", {"model": ALIAS, "prompt": [1, 2, 3, 4], "max_tokens": 3, "stream": True}),
    Seed("/v1/responses", {"model": ALIAS, "input": "hello", "max_output_tokens": 3, "metadata": {"a": "b"}}),
    Seed(
        "/v1/responses",
        {"model": ALIAS, "input": [{"role": "user", "content": "hi"}], "max_output_tokens": 3, "stream": True},
    ),
    Seed("/v1/embeddings", {"model": ALIAS, "input": ["one", "two"], "encoding_format": "float"}),
    Seed("/v1/messages", _chat_fields("hello", system="be short")),
    Seed(
        "/v1/messages",
        _chat_fields([{"type": "text", "text": "hi"}], system=[{"type": "text", "text": "x"}], stream=True),
    ),
    Seed("/v1/audio/transcriptions", _MULTIPART, content_type="multipart/form-data; boundary=cut"),
    Seed("/v1/models", method="GET"),
    Seed(f"/v1/models/{ALIAS}", method="GET"),
)


class FuzzCase(msgspec.Struct, frozen=True):
    """One request. ``pieces``: lengths in which its body is sent. ``leaves``: when the client hangs up, if early."""

    seed: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    transport: Transport = "length"
    pieces: tuple[int, ...] = ()
    trailers: tuple[tuple[str, str], ...] = ()
    leaves: Literal["", "in the body", "after the body", "in the answer"] = ""


def mutant(seed: int, rng: random.Random) -> FuzzCase:
    """The request that ``seed`` stands for. ``rng``: made of that seed."""
    valid = rng.choice(SEEDS)
    body = _body(valid, rng)
    headers = [("content-type", valid.content_type)] if valid.method == "POST" else []
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        name, value = rng.choice(ODD_HEADERS)
        if rng.random() < 0.7:
            headers = [one for one in headers if one[0] != name]
        headers.append((name, value))
        body = _encoded(body, value, rng)
    path = valid.path
    if rng.random() < 0.05:
        path = rng.choice((path + "?a=b", path + "/", path.upper(), "/" + path, path + "%2f", path + ";a", "/v1/../v1"))
    transport = rng.choice(_TRANSPORTS)
    if transport == "http2" and len(body) > _MOST_BY_HTTP2:
        transport = "length"
    trailers: tuple[tuple[str, str], ...] = ()
    if transport == "http2" and rng.random() < 0.4:
        trailers = rng.choice(((("x-trailer", "1"),), (("model", "other"),), (("x-attache-server", "default/llama"),)))
    return FuzzCase(
        seed=seed,
        method=valid.method if rng.random() < 0.97 else rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE")),
        path=path,
        headers=tuple(headers),
        body=body,
        transport=transport,
        pieces=_pieces(len(body), rng),
        trailers=trailers,
        leaves=rng.choice(("in the body", "after the body", "in the answer")) if rng.random() < 0.1 else "",
    )


def _body(valid: Seed, rng: random.Random) -> bytes:
    body = valid.body if isinstance(valid.body, bytes) else _written(valid.body, rng)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 3))):
        body = broken(body, rng, SPECIAL)
    if rng.random() < 0.02:
        body = body.decode(errors="replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32-be")))
    return body


def _written(value: object, rng: random.Random) -> bytes:
    """JSON whose structure is changed in up to three places."""
    odd: list[bytes] = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        value = changed(value, rng, lambda: _placeholder(rng, odd), FIELDS)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
    body = text.encode("utf-8", "surrogatepass")
    for number, replacement in enumerate(odd):
        body = body.replace(json.dumps(_PLACEHOLDER + str(number)).encode(), replacement)
        body = body.replace(f'"{_PLACEHOLDER}{number}"'.encode(), replacement)
    if rng.random() < 0.1:
        body = _with_double_key(body, rng)
    if rng.random() < 0.05:
        body = _escaped(body, rng)
    return body


def _placeholder(rng: random.Random, odd: list[bytes]) -> str:
    """In the place of something odd, which is added to ``odd``."""
    odd.append(rng.choice(ODD_VALUES))
    return _PLACEHOLDER + str(len(odd) - 1)


def _with_double_key(body: bytes, rng: random.Random) -> bytes:
    key = rng.choice((b'"model"', b'"mod\\u0065l"', b'"max_tokens"', b'"\\u006e"', b'"stream"', b'"messages"'))
    value = rng.choice((b'"llama"', b'"other"', b"1", b"true", b"null", b"[]"))
    if rng.random() < 0.5:
        return body.replace(b"{", b"{" + key + b":" + value + b",", 1)
    return body[: body.rfind(b"}")] + b"," + key + b":" + value + b"}"


def _escaped(body: bytes, rng: random.Random) -> bytes:
    """Some letters as escapes, which mean the same."""
    letter = rng.choice((b"m", b"o", b"d", b"e", b"l", b"s", b"t"))
    return body.replace(letter, f"\\u{letter[0]:04x}".encode())


def _encoded(body: bytes, encoding: str, rng: random.Random) -> bytes:
    """Compressed as the header declares, or not."""
    if encoding in {"gzip", "deflate"} and rng.random() < 0.6:
        return gzip.compress(body, mtime=0) if encoding == "gzip" else zlib.compress(body)
    return body


def _pieces(length: int, rng: random.Random) -> tuple[int, ...]:
    """Lengths that add up to ``length``: all at once, or some pieces."""
    if not length or rng.random() < 0.5:
        return (length,) if length else ()
    cuts = sorted({rng.randint(1, length) for _ in range(rng.choice((1, 2, 20)))} | {length})
    return tuple(end - start for start, end in zip([0, *cuts], cuts, strict=False))
