# SPDX-License-Identifier: Apache-2.0
"""The agent's settings from the options of its command."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from controller.agents.runtime.adapter_names import SourcePolicy
from controller.agents.runtime.dialects import DIALECTS
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.health import HealthSettings
from controller.agents.runtime.model_requests import ModelRequest, read_prompts
from controller.agents.runtime.settings import AdapterSettings, AgentSettings, WarmUp

if TYPE_CHECKING:
    import argparse


def settings_of(options: argparse.Namespace) -> AgentSettings:
    """Raises ValueError for a mistake, OSError for a file that cannot be read."""
    prompts = read_prompts(options.warm_up_prompts.read_text()) if options.warm_up_prompts else ()
    probe = None
    if options.probe_request is not None:
        try:
            probe = msgspec.json.decode(options.probe_request.read_bytes(), type=ModelRequest)
        except msgspec.DecodeError as error:
            raise ValueError(f"{options.probe_request}: {error}") from error
    cache = options.weights_cache
    return AgentSettings(
        engine=_engine(options.engine),
        dialect=DIALECTS[options.dialect],
        metrics_url=options.engine_metrics or _metrics_url(options.engine, options.dialect),
        health=HealthSettings(
            failures=options.probe_failures,
            probe_timeout_s=options.probe_timeout,
            dead_after_s=options.dead_after,
            stalled_after_s=options.stalled_after,
        ),
        drain=DrainSettings(settle_s=options.settle, timeout_s=options.drain_timeout),
        warm_up=WarmUp(
            rounds=options.warm_up, lengths=options.warm_up_tokens, prompts=prompts, timeout_s=options.warm_up_timeout
        ),
        adapters=AdapterSettings(
            file=options.adapters,
            limit=options.max_adapters,
            keep_s=options.keep_adapter,
            policy=SourcePolicy(tuple(options.allow_path) or (cache,), tuple(options.allow_uri), options.declared_only),
            cache=cache,
            links=options.link_dir or cache / "adapters",
            download_timeout_s=options.download_timeout,
            load_timeout_s=options.load_timeout,
        ),
        model=options.model,
        probe=probe,
        probe_interval_s=options.probe_interval,
        engine_key_file=options.engine_key_file,
        token_file=options.token_file,
    )


def _engine(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"--engine: '{url}' is no URL; write http://127.0.0.1:8000")
    return url.rstrip("/")


def _metrics_url(engine: str, dialect: str) -> str:
    kind = DIALECTS[dialect]
    if not kind.metrics_port:
        return engine.rstrip("/") + kind.metrics_path
    host = urlsplit(engine).hostname or "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{kind.metrics_port}{kind.metrics_path}"
