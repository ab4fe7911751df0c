"""``python -m bench.engine``: an OpenAI-compatible server that behaves like vLLM on a named GPU, without the GPU."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys

import uvloop

from bench.engine.hardware import PRESETS
from bench.engine.publisher import KvEventsConfig
from bench.engine.scheduler import EngineLimits
from bench.engine.server import EngineServer, EngineSettings


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    settings = _read(arguments)
    try:
        uvloop.run(_serve(settings))
    except OSError as error:
        print(f"cannot listen on {settings.host}:{settings.port}: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: EngineSettings) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):  # that is how it is told to end
        await EngineServer(settings).run()


def _read(arguments: list[str] | None) -> EngineSettings:
    parser = argparse.ArgumentParser(prog="bench.engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="the name that clients ask for")
    parser.add_argument("--lora", action="append", default=[], metavar="NAME", help="an adapter that is loaded")
    parser.add_argument("--hardware", choices=sorted(PRESETS), default="h100-llama-3.1-8b")
    parser.add_argument("--speed", type=float, default=1.0, help="engine seconds in a second")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-gpu-blocks-override", type=int, help="default: what the GPU's memory holds")
    parser.add_argument("--max-model-len", type=int, help="default: 131072, or what the KV cache holds")
    parser.add_argument("--default-max-tokens", type=int, default=256, help="of answers whose request names no limit")
    parser.add_argument("--stream-headers", choices=["immediate", "first-token"], default="immediate")
    parser.add_argument("--seed", type=int, default=0)
    events = parser.add_argument_group("KV events")
    events.add_argument("--kv-events-port", type=int, help="publish what enters and leaves the cache")
    events.add_argument("--kv-replay-port", type=int, help="replay what a subscriber has missed")
    events.add_argument("--kv-events-form", choices=["maps", "arrays"], default="maps", help="vLLM's, new and old")
    options = parser.parse_args(arguments)
    hardware = PRESETS[options.hardware]
    blocks = options.num_gpu_blocks_override or hardware.kv_tokens() // options.block_size
    capacity = blocks * options.block_size
    if options.speed <= 0:
        parser.error("--speed must be above 0")
    if options.max_model_len is not None and options.max_model_len > capacity:
        parser.error(f"--max-model-len {options.max_model_len} is more than the KV cache holds ({capacity} tokens)")
    return EngineSettings(
        host=options.host,
        port=options.port,
        model=options.model,
        adapters=tuple(options.lora),
        hardware=hardware,
        limits=EngineLimits(options.max_num_seqs, options.max_num_batched_tokens, options.block_size, blocks),
        max_model_len=options.max_model_len or min(131_072, capacity),
        default_max_tokens=options.default_max_tokens,
        speed=options.speed,
        seed=options.seed,
        headers_first=options.stream_headers == "immediate",
        events=None
        if options.kv_events_port is None
        else KvEventsConfig(
            options.kv_events_port,
            options.kv_replay_port,
            f"kv@{options.host}:{options.port}@{options.model}",
            options.kv_events_form,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
