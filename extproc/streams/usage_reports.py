# SPDX-License-Identifier: Apache-2.0
"""What a gateway is told of an answer's token usage, as metadata of the answer's last message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.scheduling.picker import PluginFailed
from extproc.streams.messages import ProcessingResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extproc.scheduling.framework import UsageReporter
    from extproc.streams.usage import ReportedUsage


def reports_metadata(
    reporters: Iterable[UsageReporter], usage: ReportedUsage, failed: Callable[[PluginFailed], None]
) -> bytes:
    """Of a serialized ProcessingResponse, to be appended to it; empty if there is nothing to tell.

    ``failed``: is told of plugins that fail, for which the gateway is told nothing.
    """
    if usage.prompt_tokens is None and usage.completion_tokens is None:
        return b""
    given = _as_reported(usage)
    answer = ProcessingResponse()
    for reporter in reporters:
        try:
            value = reporter.value(given)
        except PluginFailed as error:
            failed(error)
            continue
        if value:
            namespace = answer.dynamic_metadata.fields[reporter.namespace].struct_value
            namespace.fields[reporter.name].number_value = value
    return answer.SerializeToString()


def _as_reported(usage: ReportedUsage) -> dict[str, object]:
    """As an answer has it; and the details of the prompt under llm-d's name, too."""
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    given: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if usage.cached_tokens is not None:
        details = {"cached_tokens": usage.cached_tokens}
        given.update(prompt_tokens_details=details, prompt_token_details=details)
    return given
