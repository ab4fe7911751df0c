# SPDX-License-Identifier: Apache-2.0
"""Requests that show that the model answers, and requests that warm it up."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.agents.runtime.dialects import Api

_WORD: Final = " hello"


class ModelRequest(msgspec.Struct, frozen=True):
    """A POST. ``proof``: the member of the answer that must be a list with something in it; empty: status 200 will
    do.
    """

    path: str
    body: dict[str, Any]
    proof: str = ""


class _Parent(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None
    root: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Parent] = []


_PATHS: Final[Mapping[Api, tuple[str, str]]] = MappingProxyType(
    {
        "completions": ("/v1/completions", "choices"),
        "chat": ("/v1/chat/completions", "choices"),
        "embeddings": ("/v1/embeddings", "data"),
    }
)


def model_request(api: Api, *, model: str, prompt: str, max_tokens: int) -> ModelRequest:
    """A request by one of OpenAI's APIs."""
    path, proof = _PATHS[api]
    body: dict[str, Any] = {"model": model}
    match api:
        case "chat":
            body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
        case "completions":
            body |= {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        case _:
            body |= {"input": prompt}
    return ModelRequest(path, body, proof)


def is_answer(content: bytes, proof: str) -> bool:
    """Whether the body of an answer with status 200 is what the model would say."""
    if not proof:
        return True
    try:
        answer = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return False
    listed = answer.get(proof) if isinstance(answer, dict) else None
    return isinstance(listed, list) and bool(listed)


def means_other_api(status: int) -> bool:
    """Whether a refusal may mean that the engine has no such API, or not for this model: another one is tried."""
    return status in {400, 404, 405, 422, 501}


def base_model(content: bytes) -> str:
    """The first model of ``GET /v1/models`` that is no adapter; raises ValueError if there is none."""
    for one in _listed(content):
        if not one.parent:
            return one.id
    raise ValueError("the engine lists no model")


def loaded_adapters(content: bytes) -> dict[str, str]:
    """Adapters that ``GET /v1/models`` lists: where the files of each are, empty if it does not tell; or ValueError."""
    return {one.id: one.root or "" for one in _listed(content) if one.parent}


def _listed(content: bytes) -> list[_Parent]:
    try:
        return msgspec.json.decode(content, type=_Models).data
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no list of models: {error}") from error


class _Indexed(msgspec.Struct, frozen=True):
    name: str
    state: str = ""


def repository_models(content: bytes) -> dict[str, str]:
    """Models of a V2 repository that are loaded; they have no paths. Raises ValueError."""
    try:
        listed = msgspec.json.decode(content, type=list[_Indexed])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no index of a repository: {error}") from error
    return {one.name: "" for one in listed if one.state == "READY"}


def warm_up_prompts(count: int, lengths: Sequence[int], prompts: Sequence[str]) -> Iterator[str]:
    """``count`` rounds of prompts of about so many tokens, and of the prompts given.

    No two begin alike: a prompt that is found in the prefix cache warms nothing.
    """
    for number in range(count):
        for length in lengths:
            yield f"{number}.{length}" + _WORD * max(length - 3, 0)
        yield from prompts


def read_prompts(text: str) -> tuple[str, ...]:
    """A prompt a line; empty lines are left out."""
    return tuple(line for one in text.splitlines() if (line := one.strip()))
