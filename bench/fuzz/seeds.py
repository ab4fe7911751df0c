# SPDX-License-Identifier: Apache-2.0
"""Valid requests of every API, and what parsers of JSON and HTTP find special."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.stack import ALIAS
from extproc.protocol import APIS_BY_PATH, Api

if TYPE_CHECKING:
    from collections.abc import Mapping

_WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
_MULTIPART: Final = (
    b'--cut\r\ncontent-disposition: form-data; name="model"\r\n\r\nllama\r\n--cut\r\ncontent-disposition: form-data; '
    b'name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\nRIFF$\0\0\0WAVEfmt \x10\0\0\0\r\n--cut--\r\n'
)


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


class Seed(msgspec.Struct, frozen=True):
    """One valid request. ``body``: JSON as plain data, or other content as bytes."""

    path: str
    body: object = b""
    method: str = "POST"
    content_type: str = "application/json"


def _said(text: object, **fields: object) -> dict[str, object]:
    return {"model": ALIAS, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}


def _plain(value: object) -> object:
    """As it comes out of JSON: lists are lists."""
    return msgspec.json.decode(msgspec.json.encode(value))


SEEDS: Final = (
    *(
        Seed(path, _plain({"model": ALIAS, **api.spec.example}))
        for path, api in APIS_BY_PATH.items()
        if api.spec.body == "json"
    ),
    Seed("/v1/chat/completions", _said("hello", stream=True, stream_options={"include_usage": True}, n=1)),
    Seed(
        "/v1/chat/completions",
        _said(
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
    Seed("/v1/messages", _said("hello", system="be short")),
    Seed("/v1/messages", _said([{"type": "text", "text": "hi"}], system=[{"type": "text", "text": "x"}], stream=True)),
    Seed("/v1/audio/transcriptions", _MULTIPART, content_type="multipart/form-data; boundary=cut"),
    Seed("/v1/models", method="GET"),
    Seed(f"/v1/models/{ALIAS}", method="GET"),
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
