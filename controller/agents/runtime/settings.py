# SPDX-License-Identifier: Apache-2.0
"""The agent's settings, as its command line says them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from controller.agents.runtime.adapter_names import SourcePolicy
from controller.agents.runtime.dialects import Dialect
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.health import HealthSettings
from controller.agents.runtime.model_requests import ModelRequest


class WarmUp(msgspec.Struct, frozen=True):
    """``rounds`` times all prompts, one after the other; ends after ``timeout_s`` whatever is left."""

    rounds: int = 0
    lengths: tuple[int, ...] = ()
    prompts: tuple[str, ...] = ()
    max_tokens: int = 8
    timeout_s: float = 300.0


class AdapterSettings(msgspec.Struct, frozen=True):
    """``links``: where the files of adapters appear by name; in a V2 repository, the repository itself.

    ``keep_s``: an adapter stays at least so long after it was loaded or used. ``downloader``: the command in front of
    URI.
    """

    file: Path | None = None
    limit: int = 0
    keep_s: float = 2.0
    policy: SourcePolicy = SourcePolicy()
    cache: Path = Path("/var/cache/attache")
    links: Path = Path("/var/cache/attache/adapters")
    downloader: tuple[str, ...] = ()
    download_timeout_s: float = 1800.0
    load_timeout_s: float = 120.0


class AgentSettings(msgspec.Struct, frozen=True):
    """``model``: empty for the first that the engine lists. ``probe``: the request in place of the dialect's own."""

    engine: str
    dialect: Dialect
    metrics_url: str
    health: HealthSettings = HealthSettings()
    drain: DrainSettings = DrainSettings()
    warm_up: WarmUp = WarmUp()
    adapters: AdapterSettings = AdapterSettings()
    model: str = ""
    probe: ModelRequest | None = None
    probe_interval_s: float = 2.0
    metrics_interval_s: float = 5.0
    # how long the first answer of the model may take
    answer_timeout_s: float = 300.0
    engine_key_file: Path | None = None
    token_file: Path | None = None
