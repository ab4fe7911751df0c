# SPDX-License-Identifier: Apache-2.0
"""The agent's settings, and how the options of its command become them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from controller.agents.runtime.batching.queue import BatchLimits
from controller.agents.runtime.declared_adapters import SourcePolicy
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.engine_client import ModelRequest, parse_prompts
from controller.agents.runtime.engine_health import HealthSettings
from extproc.engines.dialects import DIALECTS, Dialect

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


class WarmUpSettings(msgspec.Struct, frozen=True):
    """``rounds`` times all prompts, one after the other; ends after ``timeout_s`` whatever is left."""

    rounds: int = 0
    lengths: tuple[int, ...] = ()
    prompts: tuple[str, ...] = ()
    max_tokens: int = 8
    timeout_s: float = 300.0


class AdapterSettings(msgspec.Struct, frozen=True):
    """``links``: where the files of adapters appear by name; in a V2 repository, the repository itself.

    ``memory``: bytes that all of them may take together; 0: any. ``keep_s``: an adapter stays at least so long after it
    was loaded or used. ``idle_unload_s``: one that is not pinned is unloaded when it was not used for so long; 0:
    never. ``downloader``: the command in front of URI.
    """

    file: Path | None = None
    limit: int = 0
    memory: int = 0
    idle_unload_s: float = 0.0
    keep_s: float = 2.0
    policy: SourcePolicy = SourcePolicy()
    cache: Path = Path("/var/cache/attache")
    links: Path = Path("/var/cache/attache/adapters")
    downloader: tuple[str, ...] = ()
    download_timeout_s: float = 1800.0
    load_timeout_s: float = 120.0


class BatcherSettings(msgspec.Struct, frozen=True):
    """``host`` and ``port``: where it listens. ``engine``: the engine's URL. ``timeout_s``: of a joined call."""

    host: str
    port: int
    engine: str
    limits: BatchLimits = BatchLimits()
    timeout_s: float = 300.0


class AgentSettings(msgspec.Struct, frozen=True):
    """``model``: empty for the first that the engine lists. ``probe``: the request in place of the dialect's own.
    ``is_disaggregated``: the engine is one of prefill and decode. ``batcher``: None if requests are not joined.
    """

    engine: str
    dialect: Dialect
    metrics_url: str
    health: HealthSettings = HealthSettings()
    drain: DrainSettings = DrainSettings()
    warm_up: WarmUpSettings = WarmUpSettings()
    adapters: AdapterSettings = AdapterSettings()
    model: str = ""
    probe: ModelRequest | None = None
    is_disaggregated: bool = False
    probe_interval_s: float = 2.0
    metrics_interval_s: float = 5.0
    # how long the first answer of the model may take
    answer_timeout_s: float = 300.0
    engine_key_file: Path | None = None
    token_file: Path | None = None
    batcher: BatcherSettings | None = None

    @property
    def own_request_fields(self) -> Mapping[str, str | int]:
        """Further fields of the agent's own requests: no other engine takes part in them."""
        return self.dialect.unpaired if self.is_disaggregated else {}


def parse_settings(options: argparse.Namespace) -> AgentSettings:
    """Raises ValueError for a mistake, OSError for a file that cannot be read."""
    prompts = parse_prompts(options.warm_up_prompts.read_text()) if options.warm_up_prompts else ()
    probe = None
    if options.probe_request is not None:
        try:
            probe = msgspec.json.decode(options.probe_request.read_bytes(), type=ModelRequest)
        except msgspec.DecodeError as error:
            raise ValueError(f"{options.probe_request}: {error}") from error
    if "{name}" in DIALECTS[options.dialect].health and not options.model:
        raise ValueError(f"--dialect {options.dialect} needs --model: the paths of its probes name it")
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
        warm_up=WarmUpSettings(
            rounds=options.warm_up, lengths=options.warm_up_tokens, prompts=prompts, timeout_s=options.warm_up_timeout
        ),
        adapters=AdapterSettings(
            file=options.adapters,
            limit=options.max_adapters,
            memory=options.max_memory,
            idle_unload_s=options.idle_unload,
            keep_s=options.keep_adapter,
            policy=SourcePolicy(tuple(options.allow_path) or (cache,), tuple(options.allow_uri), options.declared_only),
            cache=cache,
            links=options.link_dir or cache / "adapters",
            download_timeout_s=options.download_timeout,
            load_timeout_s=options.load_timeout,
        ),
        model=options.model,
        probe=probe,
        is_disaggregated=options.disaggregated,
        probe_interval_s=options.probe_interval,
        engine_key_file=options.engine_key_file,
        token_file=options.token_file,
        batcher=_batcher(options),
    )


def _batcher(options: argparse.Namespace) -> BatcherSettings | None:
    if options.batch_listen is None:
        return None
    limits = BatchLimits(max_rows=options.batch_size, max_delay_s=options.batch_delay)
    host, port = options.batch_listen
    return BatcherSettings(host, port, _engine(options.engine), limits)


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
