# SPDX-License-Identifier: Apache-2.0
"""HTTP to the engine: a connection for each request, bounded in time and size; requests that probe and warm up a model.

Redirects are not followed: the engine's key and the adapters' paths are for the engine alone. Nothing is unpacked, as a
small answer may become a large one.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

import aiohttp
import msgspec

from extproc.engines.engine_responses import (
    error_message,
    is_unloaded,
    parse_adapters,
    parse_load_response,
    parse_repository_index,
)
from extproc.http_body import read_at_most
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from extproc.engines.dialects import Dialect
    from extproc.engines.engine_responses import AdapterLoadResponse

_WORD: Final = " hello"
# APIs that serve a model's first request, tried in order, with the ``proof`` of each.
PROBES: Final[Mapping[Api, str]] = MappingProxyType(
    {
        Api.COMPLETIONS: "choices",
        Api.CHAT: "choices",
        Api.EMBEDDINGS: "data",
        # engines differ in the form of these answers
        Api.RERANK: "",
        Api.SCORE: "",
        Api.TRANSCRIPTIONS: "",
        Api.SPEECH: "",
    }
)
# As extproc: vLLM's pages have 30 to 200 KB.
_MOST_BYTES: Final = 4 * 1024 * 1024
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class ModelRequest(msgspec.Struct, frozen=True):
    """A POST. ``proof``: the member of the response that must be a non-empty list; empty: status 200 suffices.
    ``is_form``: the body is a form, else JSON.
    """

    path: str
    body: dict[str, Any]
    proof: str = ""
    is_form: bool = False


def build_model_request(
    api: Api, *, model: str, prompt: str, max_tokens: int, more: Mapping[str, Any] = _NOTHING
) -> ModelRequest:
    """The example of ``api`` with another prompt. ``more``: further fields."""
    spec = api.spec
    body: dict[str, Any] = {"model": model, **spec.example}
    if spec.prompt == "messages":
        body["messages"] = [{"role": "user", "content": prompt}]
    body |= {name: prompt for name in ("prompt", "input", "query", "text_1") if name in body}
    if "max_tokens" in body:
        body |= {"max_tokens": max_tokens, "temperature": 0, **more}
    return ModelRequest(spec.paths[0], body, PROBES[api], is_form=spec.body == "form")


def is_model_output(content: bytes, proof: str) -> bool:
    """Whether the body of an answer with status 200 is one that the model produced."""
    if not proof:
        return True
    try:
        answer = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return False
    listed = answer.get(proof) if isinstance(answer, dict) else None
    return isinstance(listed, list) and bool(listed)


def is_wrong_api_status(status: int) -> bool:
    """Whether a refusal may mean that the engine has no such API, or not for this model: another one is tried."""
    return status in {400, 404, 405, 422, 501}


def warm_up_prompts(count: int, lengths: Sequence[int], prompts: Sequence[str]) -> Iterator[str]:
    """``count`` rounds of prompts of about so many tokens, and of the prompts given.

    No two begin alike: a prompt that is found in the prefix cache warms nothing.
    """
    for number in range(count):
        for length in lengths:
            yield f"{number}.{length}" + _WORD * max(length - 3, 0)
        yield from prompts


def parse_prompts(text: str) -> tuple[str, ...]:
    """A prompt a line; empty lines are left out."""
    return tuple(line for one in text.splitlines() if (line := one.strip()))


class EngineFailed(Exception):
    """The engine did not answer, or gave an error; the message has which."""


class EngineUnreachable(EngineFailed):
    """The engine's port refuses connections."""


class EngineResponse(msgspec.Struct, frozen=True):
    """Of any status."""

    status: int
    body: bytes

    def expect_success(self, what: str) -> bytes:
        """The body; raises EngineFailed if the status is no success."""
        if 200 <= self.status < 300:
            return self.body
        raise EngineFailed(f"{what}: status {self.status}: {error_message(self.body)}")


class EngineClient:
    """``key_file``: holds the engine's API key; read for each request, because Secrets are replaced."""

    def __init__(self, base: str, dialect: Dialect, key_file: Path | None = None) -> None:
        self._base = base.rstrip("/")
        self._dialect = dialect
        self._key_file = key_file
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # a restarted engine must not be queried on a connection to the former one
        connector = aiohttp.TCPConnector(force_close=True, limit=32)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, *, timeout_s: float) -> EngineResponse:
        """``path``: or a whole URL. Raises EngineFailed."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float, is_form: bool = False) -> EngineResponse:
        """``is_form``: bytes in ``body`` are files; else it is sent as JSON. Raises EngineFailed."""
        return await self._ask("POST", path, _form(body) if is_form else msgspec.json.encode(body), timeout_s)

    async def list_adapters(self, *, timeout_s: float) -> dict[str, str]:
        """The engine's adapters and their paths, empty where it does not list them; raises EngineFailed."""
        try:
            if self._dialect.adapters == "repository":
                answer = await self.post("/v2/repository/index", {}, timeout_s=timeout_s)
                return parse_repository_index(answer.expect_success("the repository's index"))
            answer = await self.get("/v1/models", timeout_s=timeout_s)
            return parse_adapters(answer.expect_success("the list of models"))
        except ValueError as error:
            raise EngineFailed(str(error)) from error

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> AdapterLoadResponse:
        """Raises EngineFailed if it does not answer."""
        is_model = self._dialect.adapters == "repository"
        if is_model:
            answer = await self.post(_repository(name, "load"), {}, timeout_s=timeout_s)
        else:
            body = {"lora_name": name, "lora_path": path}
            answer = await self.post(self._dialect.load_path, body, timeout_s=timeout_s)
        return parse_load_response(answer.status, answer.body, is_model=is_model)

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """Raises EngineFailed if the engine still holds it."""
        if self._dialect.adapters == "repository":
            answer = await self.post(_repository(name, "unload"), {}, timeout_s=timeout_s)
        else:
            answer = await self.post(self._dialect.unload_path, {"lora_name": name}, timeout_s=timeout_s)
        if not is_unloaded(answer.status, answer.body):
            raise EngineFailed(f"status {answer.status}: {error_message(answer.body)}")

    async def _ask(
        self, method: str, path: str, body: bytes | aiohttp.FormData | None, timeout_s: float
    ) -> EngineResponse:
        if self._session is None:
            raise RuntimeError("enter the client first")
        url = path if "://" in path else f"{self._base}{path}"
        headers = {"Accept-Encoding": "identity"}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/json"
        if self._key_file is not None:
            with contextlib.suppress(
                OSError, UnicodeDecodeError
            ):  # without its key the engine refuses the request, and that error is more specific
                headers["Authorization"] = f"Bearer {self._key_file.read_text().strip()}"
        try:
            # within a pod there is no other server: the certificate is not compared
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, url, data=body, headers=headers, ssl=False, allow_redirects=False
                ) as answer,
            ):
                return EngineResponse(answer.status, await _read(answer))
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise EngineUnreachable(f"nobody listens: {url}") from error
            raise EngineFailed(f"{method} {url}: {error}") from error
        except TimeoutError as error:
            raise EngineFailed(f"{method} {url}: no answer in {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineFailed(f"{method} {url}: {type(error).__name__}: {error}") from error


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    body = await read_at_most(answer.content, _MOST_BYTES)
    if body is None:
        raise ValueError(f"an answer of more than {_MOST_BYTES} bytes")
    return body


def _form(fields: Mapping[str, Any]) -> aiohttp.FormData:
    made = aiohttp.FormData()
    for name, value in fields.items():
        made.add_field(name, value, filename=name if isinstance(value, bytes) else None)
    return made


def _repository(name: str, what: str) -> str:
    return f"/v2/repository/models/{quote(name, safe='')}/{what}"
