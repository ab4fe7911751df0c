# SPDX-License-Identifier: Apache-2.0
"""Requests that are broken in some way: in bytes, in JSON's structure, in headers, on the way"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from bench.fuzz.seeds import FIELDS, ODD_HEADERS, ODD_VALUES, SEEDS, SPECIAL

if TYPE_CHECKING:
    import random

    from bench.fuzz.seeds import Seed

# Window of a new HTTP/2 connection, less something: larger bodies go over HTTP/1.1.
_MOST_BY_HTTP2: Final = 60_000
_PLACEHOLDER: Final = "\ue000"


Transport = Literal["length", "chunked", "http2"]
_TRANSPORTS: Final[tuple[Transport, ...]] = ("length", "length", "chunked", "http2")


class Case(msgspec.Struct, frozen=True):
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


def mutant(seed: int, rng: random.Random) -> Case:
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
    return Case(
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
        body = _broken(body, rng)
    if rng.random() < 0.02:
        body = body.decode(errors="replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32-be")))
    return body


def _written(value: object, rng: random.Random) -> bytes:
    """JSON whose structure is changed in up to three places."""
    odd: list[bytes] = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        value = _with_odd_value(value, rng, odd)
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


def _with_odd_value(value: object, rng: random.Random, odd: list[bytes]) -> object:
    """``value`` with a placeholder for something odd in it; what that is, is added to ``odd``."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        kind = rng.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.3:
            changed[rng.choice(FIELDS)] = _placeholder(rng, odd)
        else:
            changed[key] = _with_odd_value(value[key], rng, odd)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], _with_odd_value(value[index], rng, odd), *value[index + rng.randint(0, 1) :]]
    return _placeholder(rng, odd)


def _placeholder(rng: random.Random, odd: list[bytes]) -> str:
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


def _broken(body: bytes, rng: random.Random) -> bytes:
    at, end = rng.randint(0, len(body)), rng.randint(0, len(body))
    match rng.randrange(6):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + body[at : at + 30] * rng.randint(2, 50) + body[at:]
        case 2:
            return body[: min(at, end)] + body[max(at, end) :]
        case 3:
            return rng.choice((b"\xef\xbb\xbf", b" " * 5000, b"\0", b"\n")) + body
        case 4:
            return body[:at] + rng.randbytes(rng.randint(1, 20)) + body[at:]
        case _:
            return body[:at] + rng.choice(SPECIAL) + body[at + rng.choice((0, 0, 1, 5)) :]


def _encoded(body: bytes, encoding: str, rng: random.Random) -> bytes:
    """Compressed as a header says, or not."""
    if encoding in {"gzip", "deflate"} and rng.random() < 0.6:
        return gzip.compress(body, mtime=0) if encoding == "gzip" else zlib.compress(body)
    return body


def _pieces(length: int, rng: random.Random) -> tuple[int, ...]:
    """Lengths that add up to ``length``: all at once, or some pieces."""
    if not length or rng.random() < 0.5:
        return (length,) if length else ()
    cuts = sorted({rng.randint(1, length) for _ in range(rng.choice((1, 2, 20)))} | {length})
    return tuple(end - start for start, end in zip([0, *cuts], cuts, strict=False))
