# SPDX-License-Identifier: Apache-2.0
"""Adapters on demand: LoRA adapters that are loaded when a request asks for them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.api.quantities import Duration
from extproc.api.spec import NonEmpty, Spec, keyed_by


class AdapterSource(Spec, frozen=True):
    """One adapter that may be loaded. ``name``: what clients ask for, as a ModelRoute's ``loraAdapters`` has it.
    ``source``: where its weights are, a path or a URI; engines and agents get it as ``lora_path``.
    """

    name: NonEmpty
    source: NonEmpty


class AdapterLoading(Spec, frozen=True):
    """Engines load an adapter when a request asks for it, and unload the least recently used one to make room.

    ``adapters``: those that may be loaded. ``port``: of the runtime agents beside the engines, which then load;
    without it the engines do, and vLLM needs ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` for that. ``slots``: how many
    adapters an engine may hold at a time; without it, as many as the engine reports that a batch may use
    (``max_lora``), or else as many as it had when it refused another. ``timeout``: the longest that a request waits for
    its adapter.
    """

    adapters: Annotated[
        tuple[AdapterSource, ...], msgspec.Meta(min_length=1, max_length=1000, extra_json_schema=keyed_by("name"))
    ]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    timeout: Duration = Duration("60s")
