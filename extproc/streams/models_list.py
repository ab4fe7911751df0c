# SPDX-License-Identifier: Apache-2.0
"""GET /v1/models: the models that can be asked for, in OpenAI's form or in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from extproc.errors import ErrorForm
from extproc.protocol import DETAILS_PREFIX
from extproc.streams.responses import immediate_answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.routing.resolve import ListedModel


class _Model(msgspec.Struct):
    id: str
    created: int
    parent: str | None
    object: str = "model"
    owned_by: str = "attache"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


class _AnthropicModel(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    type: str = "model"


class _AnthropicModels(msgspec.Struct):
    data: list[_AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def models_answer(models: Iterable[ListedModel], created: int, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
    """OpenAI's list of models, in vLLM's form (``parent``: an adapter's base model), or Anthropic's. ``created``: Unix
    time in seconds.
    """
    if form is ErrorForm.ANTHROPIC:
        found = [_anthropic(model, created) for model in models]
        listed = _AnthropicModels(found, found[0].id if found else None, found[-1].id if found else None)
        return _answer(listed, "models")
    return _answer(_Models([_openai(model, created) for model in models]), "models")


def model_answer(model: ListedModel, created: int, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
    """One model of the list."""
    return _answer((_anthropic if form is ErrorForm.ANTHROPIC else _openai)(model, created), "model")


def _openai(model: ListedModel, created: int) -> _Model:
    return _Model(model.name, created, model.parent)


def _anthropic(model: ListedModel, created: int) -> _AnthropicModel:
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _AnthropicModel(model.name, model.name, created_at)


def _answer(body: object, what: str) -> bytes:
    return immediate_answer(200, msgspec.json.encode(body), {}, details=DETAILS_PREFIX + what)
