# SPDX-License-Identifier: Apache-2.0
"""Tokens of prompts, by the model's tokenizer files or by the engines' POST /tokenize.

Chat templates are rendered as Hugging Face's ``apply_chat_template`` does, in a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import msgspec
import numpy as np

from extproc.engines.engine_responses import UnreadableResponse, parse_json
from extproc.feeds.engine_http import EngineHttp
from extproc.request.anthropic import equivalent_chat
from extproc.request.inference_request import CHAT_TOKENS, TokenId
from extproc.request.token_apis import prompt_tokens_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from extproc.api.model_server import ModelServerSpec
    from extproc.core.request_record import Arrival
    from extproc.endpoints.table import EndpointTable
    from extproc.feeds.engine_http import EngineCredentials
    from extproc.metrics.request_metrics import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)
_KEPT_FIELDS: Final = (
    *("messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
# These decide on a chat's tokens, too, and /tokenize does not take them.
_NOT_TOKENIZED: Final = ("documents", *CHAT_TOKENS)
_PATH: Final = "/tokenize"
# Of an answer: a token with its comma and spaces, and the members beside the list.
_TOKEN_BYTES: Final = 16
_OTHER_BYTES: Final = 64 * 1024
# Most tokens that a template adds to those of the prompt, which has at most one a byte.
_TEMPLATE_TOKENS: Final = 16_384
_MOST_TOKENS: Final = 2**20
# Of an answer: commas that are not between tokens.
_OTHER_COMMAS: Final = 300
# Longer texts are encoded in a thread, so as not to delay other requests (the tokenizer releases the GIL).
_THREAD_BYTES: Final = 16 * 1024


class TemplateInvalid(Exception):
    """The template is unreadable, or rejects the messages."""


class ChatTemplate:
    """The chat template of one model and its special tokens."""

    def __init__(self, template: str | None, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._template: Any = None
        if template is None:
            return
        try:
            # an optional dependency, needed only for local tokenizers
            from jinja2 import TemplateError  # noqa: PLC0415
            from jinja2.ext import loopcontrols  # noqa: PLC0415
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415
        except ImportError:
            raise TemplateInvalid("install the extra: pip install 'attache[tokenizer]'") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._error: type[Exception] = TemplateError
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise TemplateInvalid(f"the chat template cannot be read: {error}") from None

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """Read ``chat_template.jinja`` or ``tokenizer_config.json``; without a template, ``render`` fails."""
        file, own = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        template = own.read_text() if own.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several templates by name
            template = next((one["template"] for one in template if one.get("name") == "default"), None)
        special = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(name)
            if value is not None:
                special[name] = value["content"] if isinstance(value, dict) else value
        return cls(template, special)

    def render(self, body: dict[str, Any]) -> str:
        """The prompt of a chat request with this body; raises TemplateInvalid."""
        if self._template is None:
            raise TemplateInvalid("the tokenizer's files have no chat template")
        options = body.get("chat_template_kwargs") or {}
        try:
            text: str = self._template.render(
                messages=[_plain(message) for message in body.get("messages", [])],
                tools=body.get("tools"),
                documents=body.get("documents"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                **self._special_tokens,
                **options,
            )
        except (self._error, TypeError, ValueError, KeyError) as error:
            raise TemplateInvalid(f"the chat template refuses these messages: {error}") from None
        return text


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Join text parts to one string, as vLLM does for templates that support only strings."""
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content if isinstance(part, dict)):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateInvalid(message)


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


_tokens: Final = msgspec.json.Decoder(_Tokens)


def max_tokens_in_payload(payload: bytes) -> int:
    """How many tokens a prompt may have that was sent in ``payload``."""
    return min(_MOST_TOKENS, 2 * len(payload) + _TEMPLATE_TOKENS)


def parse_tokens(body: bytes, most: int) -> list[int]:
    """Of ``POST /tokenize``, at most ``most``. Raises Unreadable."""
    # counted before they are made: each takes more memory than its digits
    if body.count(b",") > most + _OTHER_COMMAS:
        raise UnreadableResponse(f"more than {most} tokens came for a prompt; see what answers at this address")
    return parse_json(_tokens, body, "the list of tokens").tokens


class TokenizeRefused(ValueError):
    """An engine does not tokenize a prompt; another one would not either."""


class EngineTokenizer:
    """Tokenizes at the engine with the fewest requests in flight (POST /tokenize) of those that do not fail; at the
    next one if that cannot be reached or its answer cannot be read.

    An engine that is gone has the fewest of all: by its load alone it would be tried every time. Chance decides between
    equals: all requests of a burst come before the first of them is in flight.
    """

    def __init__(self, access: EngineCredentials) -> None:
        """``access``: TLS and keys of engines."""
        self._http = EngineHttp(access)
        self._chance = np.random.default_rng()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """Tokenize in the engine, which applies its own chat template. Raises OSError and ValueError."""
        body: dict[str, Any] = msgspec.json.decode(arrival.body)
        chat = equivalent_chat(body, arrival.request)
        if any(body.get(name) for name in _NOT_TOKENIZED):
            return None
        if chat is not None:
            prompt: dict[str, Any] = {name: chat[name] for name in _KEPT_FIELDS if name in chat}
        elif isinstance(body.get("prompt"), str):
            prompt = {"prompt": body["prompt"]}
        else:
            return None
        payload = json.dumps({"model": arrival.destination.model, **prompt}).encode()
        engines = self._engines(arrival.pool.table)
        for address in engines:
            try:
                return await self._ask(arrival.pool.spec, address, payload)
            except (ConnectionError, UnreadableResponse):
                if address == engines[-1]:
                    raise
        raise ConnectionError("there is no engine to ask")

    def _engines(self, table: EndpointTable) -> list[str]:
        """The two engines to try, the better one first; one if there is a single engine."""
        load = np.where(table.is_active, table.in_flight, np.inf)
        best_first = np.lexsort((self._chance.random(len(load)), load, table.trips > 0, ~table.is_active))
        return [table.addresses[row] for row in best_first[:2].tolist() if table.is_active[row]]

    async def _ask(self, spec: ModelServerSpec, address: str, payload: bytes) -> Sequence[int]:
        most = max_tokens_in_payload(payload)
        answer = await self._http.post(
            spec,
            address,
            _PATH,
            payload,
            timeout_s=spec.tokenizer.timeout,
            most_bytes=_TOKEN_BYTES * most + _OTHER_BYTES,
        )
        if answer.status != HTTPStatus.OK:
            raise TokenizeRefused(f"{address}{_PATH} answers {answer.status}")
        return parse_tokens(answer.body, most)


class TokenizerMissing(Exception):
    """The tokenizer's files are missing or unusable."""


class Tokenizer(Protocol):
    """Turns a request into the tokens that engines will see."""

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """The prompt's tokens, None if unsupported. May raise OSError or ValueError."""
        ...


class Tokenizers:
    """The engines' tokenizer, and those of files. A failure never stops a request: the approximate index decides
    instead.
    """

    def __init__(self, metrics: Metrics, access: EngineCredentials) -> None:
        """``access``: TLS and keys of engines, and what names of files are relative to."""
        self._metrics = metrics
        self._access = access
        self._local: dict[str, LocalTokenizer] = {}
        self._engines: EngineTokenizer | None = None
        # names of pools
        self._failing: set[str] = set()

    async def tokens_of(self, arrival: Arrival) -> Sequence[int] | None:
        """The prompt's tokens, or None if that fails or takes too long."""
        pool = arrival.pool
        request = arrival.request
        prompt = None if request.api is None else request.api.spec.prompt
        if prompt == "tokens":
            # the client has sent them; the parser has refused tokens that no engine's vocabulary can have
            return prompt_tokens_in(arrival.body)
        # an engine tokenizes pictures in a chat, but not in the chat that is made of another body
        has_pictures = prompt == "anthropic messages" and bool(request.media.tokens)
        if prompt is None or has_pictures:
            self._metrics.count_tokenization(pool.name, "unsupported")
            return None
        try:
            async with asyncio.timeout(pool.spec.tokenizer.timeout):
                found = await self._tokenizer(pool.spec.tokenizer.path).tokens(arrival)
        except TimeoutError:
            found, result = None, "timeout"
        except Exception as error:  # noqa: BLE001 - bodies, templates and answers are others'; the index can do without
            found, result = None, "failed"
            self._warn_once(pool, error)
        else:
            result = "unsupported" if found is None else "tokenized"
            self._failing.discard(pool.name)
        self._metrics.count_tokenization(pool.name, result)
        return found

    def retain_only(self, pools: Mapping[str, Pool]) -> None:
        """Drop what none of ``pools``, by name, uses."""
        paths = {pool.spec.tokenizer.path for pool in pools.values()}
        self._local = {path: tokenizer for path, tokenizer in self._local.items() if path in paths}
        self._failing &= pools.keys()

    async def close(self) -> None:
        """Close all connections."""
        if self._engines is not None:
            await self._engines.close()

    def _warn_once(self, pool: Pool, error: Exception) -> None:
        """Log once until it works again; an unforeseen error with its traceback."""
        if pool.name in self._failing:
            return
        self._failing.add(pool.name)
        foreseen = isinstance(error, OSError | ValueError | TokenizerMissing | TemplateInvalid)
        log.warning(
            "cannot tokenize prompts for %s, using the approximate index: %s",
            pool.name,
            error,
            exc_info=None if foreseen else error,
        )

    def _tokenizer(self, path: str | None) -> Tokenizer:
        """The one of the files at ``path``; None: the engines'."""
        if path is None:
            if self._engines is None:
                self._engines = EngineTokenizer(self._access)
            return self._engines
        if path not in self._local:
            self._local[path] = LocalTokenizer(self._access.folder / path)
        return self._local[path]


class LocalTokenizer:
    """A Hugging Face tokenizer: ``tokenizer.json``, and ``tokenizer_config.json`` with the chat template."""

    def __init__(self, directory: Path) -> None:
        try:
            # an optional dependency, needed only for local tokenizers
            from tokenizers import Tokenizer as FastTokenizer  # noqa: PLC0415
        except ImportError:
            raise TokenizerMissing("install the extra: pip install 'attache[tokenizer]'") from None
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerMissing(f"there is no {file}; name a model's directory in tokenizer.path, or leave it out")
        self._tokenizer = FastTokenizer.from_file(str(file))
        self._template = ChatTemplate.load(directory)

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """Tokenize as vLLM does: chats with the template, completions with the leading special tokens."""
        body = msgspec.json.decode(arrival.body)
        chat = equivalent_chat(body, arrival.request)
        if any(body.get(name) for name in ("chat_template", *CHAT_TOKENS)):
            return None
        if chat is not None:
            return await self._encode(self._template.render(chat), special=False)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return await self._encode(prompt, special=True)
        is_tokens = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)
        return prompt if is_tokens else None

    async def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        def encode() -> Sequence[int]:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
            return ids

        return await asyncio.to_thread(encode) if len(text) > _THREAD_BYTES else encode()
