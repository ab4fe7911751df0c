"""``python -m bench.engine``: an OpenAI-compatible server that behaves like vLLM on a named GPU, without the GPU.

One process can be several engines, each with a port, state and KV cache of its own: repeat --port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import uvloop

from bench.engine.hardware import PRESETS
from bench.engine.publisher import KvEventsConfig
from bench.engine.scheduler import EngineLimits
from bench.engine.server import EngineServer, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; exit status 2 if a port cannot be had."""
    engines = _read(arguments)
    status = 0
    try:
        uvloop.run(_serve(engines))
    except* OSError as group:
        for error in group.exceptions:
            print(f"cannot listen on {engines[0].host}: {error}", file=sys.stderr)
        status = 2
    return status


async def _serve(engines: Sequence[EngineSettings]) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):  # that is how it is told to end
        async with asyncio.TaskGroup() as tasks:
            for settings in engines:
                tasks.create_task(EngineServer(settings).run())


def _read(arguments: list[str] | None) -> list[EngineSettings]:
    parser = _parser()
    options = parser.parse_args(arguments)
    ports: list[int] = options.port or [8000]
    events: list[int | None] = options.kv_events_port or [None] * len(ports)
    replays: list[int | None] = options.kv_replay_port or [None] * len(ports)
    if not len(ports) == len(events) == len(replays):
        parser.error("write --kv-events-port and --kv-replay-port as often as --port, or not at all")
    hardware = PRESETS[options.hardware]
    blocks = options.num_gpu_blocks_override or hardware.kv_tokens() // options.block_size
    capacity = blocks * options.block_size
    if options.speed <= 0:
        parser.error("--speed must be above 0")
    if options.max_model_len is not None and options.max_model_len > capacity:
        parser.error(f"--max-model-len {options.max_model_len} is more than the KV cache holds ({capacity} tokens)")

    def engine(number: int) -> EngineSettings:
        return EngineSettings(
            host=options.host,
            port=ports[number],
            model=options.model,
            adapters=tuple(options.lora),
            hardware=hardware,
            limits=EngineLimits(options.max_num_seqs, options.max_num_batched_tokens, options.block_size, blocks),
            max_model_len=options.max_model_len or min(131_072, capacity),
            default_max_tokens=options.default_max_tokens,
            speed=options.speed,
            seed=options.seed + number,
            headers_first=options.stream_headers == "immediate",
            events=_publisher(options, ports[number], events[number], replays[number]),
        )

    return [engine(number) for number in range(len(ports))]


def _publisher(options: argparse.Namespace, port: int, events: int | None, replay: int | None) -> KvEventsConfig | None:
    if events is None:
        return None
    topic = f"kv@{options.host}:{port}@{options.model}"
    return KvEventsConfig(events, replay, topic, options.kv_events_form)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, action="append", help="default: 8000; repeat it for several engines")
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
    parser.add_argument("--seed", type=int, default=0, help="of the first engine; each further one has one more")
    events = parser.add_argument_group("KV events", "with several engines: one port for each, in the order of --port")
    events.add_argument("--kv-events-port", type=int, action="append", help="publish what enters and leaves the cache")
    events.add_argument("--kv-replay-port", type=int, action="append", help="replay what a subscriber has missed")
    events.add_argument("--kv-events-form", choices=["maps", "arrays"], default="maps", help="vLLM's, new and old")
    return parser


if __name__ == "__main__":
    sys.exit(main())
