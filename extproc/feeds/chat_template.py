# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates as Hugging Face's ``apply_chat_template`` does, in a sandbox."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path


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
    def read(cls, directory: Path) -> ChatTemplate:
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
