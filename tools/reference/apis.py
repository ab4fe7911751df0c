# SPDX-License-Identifier: Apache-2.0
"""The reference page of the inference APIs: what the gateway does with each."""

from __future__ import annotations

from typing import Final

from extproc.protocol import MODELS_PATH, Api, ApiSpec
from tools.reference.kinds import MARK

_HEAD: Final = f"""\
# Inference APIs

The calls that the gateway passes to engines, each under its path and its aliases; nothing else of the engines can be
reached through it. Clients send them with POST; `{MODELS_PATH}` is answered by the gateway itself.
[Operations](../operations.md#what-clients-see) says what clients see.

| API of | paths | engines | queue | usage |
|---|---|---|---|---|
"""
_COUNTED: Final = """\

**queue**: whether a request waits for its turn under `flowControl`. **usage**: what limits are settled by; without it
they keep what they reserved.

## What counts

Limits reserve the input and the output of a request before an engine gets it.

| path | input | output |
|---|---|---|
"""


def page() -> str:
    """The Markdown page."""
    rows = [_row(api.spec) for api in Api]
    counted = [f"| `{api.spec.paths[0]}` | {api.spec.input} | {api.spec.output} |" for api in Api]
    return f"{MARK}\n\n{_HEAD}" + "\n".join(rows) + "\n" + _COUNTED + "\n".join(counted) + "\n"


def _row(spec: ApiSpec) -> str:
    paths = ", ".join(f"`{path}`" for path in spec.paths)
    waits = "waits" if spec.waits_in_queue else "passes by"
    return f"| {spec.owner} | {paths} | {spec.engines} | {waits} | {_usage(spec)} |"


def _usage(spec: ApiSpec) -> str:
    if not spec.reports_usage:
        return "none"
    return "in plain answers; in streams, as the gateway asks for it" if spec.usage_if_asked else "in every answer"
