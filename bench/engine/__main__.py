"""``python -m bench.engine``: an OpenAI-compatible server that behaves like vLLM on a named GPU, without the GPU."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys

import uvloop

from bench.engine.hardware import PRESETS
from bench.engine.publisher import PublisherSettings
from bench.engine.scheduler import Limits
from bench.engine.server import EngineServer, Settings


def main(arguments: list[str] | None = None, prog: str = "bench.engine") -> int:
    """Serve until SIGINT or SIGTERM."""
    settings = _read(arguments, prog)
    try:
        uvloop.run(_serve(settings))
    except OSError as error:
        print(f"cannot listen on {settings.host}:{settings.port}: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: Settings) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):  # that is how it is told to end
        await EngineServer(settings).run()


def parser(prog: str = "bench.engine") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Simulate one vLLM engine: an OpenAI-compatible server whose latencies are those of a named GPU, "
        "without the GPU. Its answers are filler text.",
    )
    add = made.add_argument
    add("--host", default="127.0.0.1", help="IP address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="the name it serves (default: %(default)s)")
    add("--lora", action="append", default=[], metavar="NAME", help="a LoRA adapter it has loaded; may be repeated")
    add(
        "--hardware",
        choices=sorted(PRESETS),
        default="h100-llama-3.1-8b",
        help="GPU and model whose latencies it has (default: %(default)s)",
    )
    add("--speed", type=float, default=1.0, help="simulated seconds in one second (default: %(default)s)")
    add(
        "--stream-headers", choices=["immediate", "first-token"], default="immediate", help="when a stream's headers go"
    )
    add("--default-max-tokens", type=int, default=256, help="of requests that set no limit (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the lengths of answers (default: %(default)s)")
    _add_limits(made)
    add = made.add_argument_group("KV events").add_argument
    add("--kv-events-port", type=int, metavar="PORT", help="publish what enters and leaves the KV cache")
    add("--kv-replay-port", type=int, metavar="PORT", help="replay events that a subscriber has missed")
    add(
        "--kv-events-form", choices=["maps", "arrays"], default="maps", help="vLLM's current encoding, or its older one"
    )
    return made


def _add_limits(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("limits, as in vLLM").add_argument
    add("--max-num-seqs", type=int, default=256, help="requests in a batch (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=8192, help="tokens in a step (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens in a KV block (default: %(default)s)")
    add("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks (default: what the GPU's memory holds)")
    add("--max-model-len", type=int, metavar="N", help="longest request in tokens (default: 131072, or the KV cache)")


def _read(arguments: list[str] | None, prog: str) -> Settings:
    made = parser(prog)
    options = made.parse_args(arguments)
    hardware = PRESETS[options.hardware]
    blocks = options.num_gpu_blocks_override or hardware.kv_tokens() // options.block_size
    capacity = blocks * options.block_size
    if options.speed <= 0:
        made.error("--speed must be above 0")
    if options.max_model_len is not None and options.max_model_len > capacity:
        made.error(f"--max-model-len {options.max_model_len} is more than the KV cache holds ({capacity} tokens)")
    return Settings(
        host=options.host,
        port=options.port,
        model=options.model,
        adapters=tuple(options.lora),
        hardware=hardware,
        limits=Limits(options.max_num_seqs, options.max_num_batched_tokens, options.block_size, blocks),
        max_model_len=options.max_model_len or min(131_072, capacity),
        default_max_tokens=options.default_max_tokens,
        speed=options.speed,
        seed=options.seed,
        headers_first=options.stream_headers == "immediate",
        events=None
        if options.kv_events_port is None
        else PublisherSettings(
            options.kv_events_port,
            options.kv_replay_port,
            f"kv@{options.host}:{options.port}@{options.model}",
            options.kv_events_form,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
