# SPDX-License-Identifier: Apache-2.0
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

import msgspec
import uvloop

from bench.engine.hardware import PRESETS
from bench.engine.kv_connectors import TransferConfig
from bench.engine.kv_event_publisher import KvEventsConfig
from bench.engine.kv_exchange import ExchangeSettings
from bench.engine.kv_transfer import NETWORKS
from bench.engine.lora_adapters import AdapterLimits
from bench.engine.scheduler import EngineLimits
from bench.engine.server import EngineServer, EngineSettings
from extproc.api.error_hints import port_hint
from extproc.listen_sockets import ListenFailed

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: list[str] | None = None, prog: str = "bench.engine") -> int:
    """Serve until SIGINT or SIGTERM; exit status 2 if a port cannot be had."""
    engines = _read(arguments, prog)
    status = 0
    try:
        uvloop.run(_serve(engines))
    except* (OSError, ListenFailed) as group:
        for error in group.exceptions:
            is_known = isinstance(error, ListenFailed)
            print(error if is_known else f"cannot listen on {engines[0].host}: {error}", file=sys.stderr)
        status = 2
    return status


async def _serve(engines: Sequence[EngineSettings]) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):  # the signal handlers cancel it
        async with asyncio.TaskGroup() as tasks:
            for settings in engines:
                tasks.create_task(EngineServer(settings).run())


def _read(arguments: list[str] | None, prog: str) -> list[EngineSettings]:
    made = parser(prog)
    options = made.parse_args(arguments)
    ports: list[int] = options.port or [8000]
    events: list[int | None] = options.kv_events_port or [None] * len(ports)
    replays: list[int | None] = options.kv_replay_port or [None] * len(ports)
    if not len(ports) == len(events) == len(replays):
        made.error("write --kv-events-port and --kv-replay-port as often as --port, or not at all")
    configs: list[TransferConfig] = options.kv_transfer_config or []
    side_ports: list[int] = options.side_channel_port or []
    if configs and not len(ports) == len(configs) == len(side_ports):
        made.error("write --kv-transfer-config and --side-channel-port as often as --port, or not at all")
    hardware = PRESETS[options.hardware]
    blocks = options.num_gpu_blocks_override or hardware.kv_tokens() // options.block_size
    capacity = blocks * options.block_size
    if options.speed <= 0:
        made.error("--speed must be above 0")
    if options.max_model_len is not None and options.max_model_len > capacity:
        made.error(f"--max-model-len {options.max_model_len} is more than the KV cache holds ({capacity} tokens)")

    lora = _adapter_limits(options)

    def exchange(number: int) -> ExchangeSettings | None:
        if not configs:
            return None
        return ExchangeSettings(
            config=configs[number],
            host=options.side_channel_host or options.host,
            port=side_ports[number],
            model=options.model,
            network=NETWORKS[options.network],
            kv_bytes=float(hardware.model.kv_bytes_per_token),
            speed=options.speed,
            version=options.engine_version,
        )

    def engine(number: int) -> EngineSettings:
        return EngineSettings(
            host=options.host,
            port=ports[number],
            model=options.model,
            adapters=tuple(options.lora),
            hardware=hardware,
            limits=EngineLimits(
                options.max_num_seqs,
                options.max_num_batched_tokens,
                options.block_size,
                blocks,
                0 if lora is None else lora.max_loras,
            ),
            max_model_len=options.max_model_len or min(131_072, capacity),
            default_max_tokens=options.default_max_tokens,
            speed=options.speed,
            seed=options.seed + number,
            headers_first=options.stream_headers == "immediate",
            is_sglang=options.reads_like == "sglang",
            lora=lora,
            exchange=exchange(number),
            events=_publisher(options, ports[number], events[number], replays[number]),
        )

    return [engine(number) for number in range(len(ports))]


def _adapter_limits(options: argparse.Namespace) -> AdapterLimits | None:
    if not options.enable_lora:
        return None
    return AdapterLimits(
        max_loras=options.max_loras,
        max_cpu_loras=options.max_cpu_loras or options.max_loras,
        max_lora_rank=options.max_lora_rank,
        load_s=options.lora_load_time,
        overflow=options.lora_overflow,
    )


def _publisher(options: argparse.Namespace, port: int, events: int | None, replay: int | None) -> KvEventsConfig | None:
    if events is None:
        return None
    topic = f"kv@{options.host}:{port}@{options.model}"
    return KvEventsConfig(events, replay, topic, options.kv_events_form)


def parser(prog: str = "bench.engine") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Simulate a vLLM engine: an OpenAI-compatible server whose latencies are those of a named GPU, "
            "without the GPU. Its answers are filler text. One process can be several engines: repeat --port."
        ),
    )
    add = made.add_argument
    add("--host", default="127.0.0.1", help="IP address to listen on (default: %(default)s)")
    add("--port", type=_port, action="append", help="port to listen on; repeat it for several engines (default: 8000)")
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
    add(
        "--reads-like",
        choices=["vllm", "sglang"],
        default="vllm",
        help="which of max_tokens and max_completion_tokens it takes if a chat has both (default: %(default)s)",
    )
    add("--default-max-tokens", type=int, default=256, help="of requests that set no limit (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the first engine; each further one has one more (default: %(default)s)")
    _add_limits(made)
    _add_adapters(made)
    _add_pairs(made)
    add = made.add_argument_group(
        "KV events", "with several engines: one port for each, in the order of --port"
    ).add_argument
    add(
        "--kv-events-port",
        type=int,
        action="append",
        metavar="PORT",
        help="publish what enters and leaves the KV cache",
    )
    add(
        "--kv-replay-port", type=int, action="append", metavar="PORT", help="replay events that a subscriber has missed"
    )
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


def _add_pairs(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group(
        "prefill and decode on separate engines", "with several engines: one of each, in the order of --port"
    ).add_argument
    add(
        "--kv-transfer-config",
        type=_transfer_config,
        action="append",
        metavar="JSON",
        help="as vLLM's: kv_connector, kv_role, kv_load_failure_policy, engine_id; SGLang and TensorRT-LLM are"
        " connectors here, too",
    )
    add(
        "--side-channel-port",
        type=int,
        action="append",
        metavar="PORT",
        help="where other engines handshake and read: VLLM_NIXL_SIDE_CHANNEL_PORT, or the bootstrap port",
    )
    add("--side-channel-host", metavar="HOST", help="under which others reach it (default: --host)")
    add(
        "--network",
        choices=sorted(NETWORKS),
        default="nvlink",
        help="over which KV caches are transferred (default: %(default)s)",
    )
    add("--engine-version", default="0.32.0", help="only engines of one version may be paired (default: %(default)s)")


def _port(text: str) -> int:
    if hint := port_hint(text):
        raise argparse.ArgumentTypeError(hint)
    return int(text)


def _transfer_config(text: str) -> TransferConfig:
    try:
        return msgspec.json.decode(text, type=TransferConfig)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_adapters(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("LoRA adapters at run time").add_argument
    add(
        "--enable-lora",
        action="store_true",
        help=(
            "serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM does with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; a path that ends with 'missing' is not found, and 'rank-N' has rank N"
        ),
    )
    add(
        "--max-loras",
        type=int,
        default=1,
        metavar="N",
        help="adapters in a batch; requests for others wait (default: 1)",
    )
    add("--max-cpu-loras", type=int, metavar="N", help="adapters whose weights it keeps (default: --max-loras)")
    add("--max-lora-rank", type=int, default=16, metavar="N", help="the highest rank it loads (default: 16)")
    add("--lora-load-time", type=float, default=0.5, metavar="SECONDS", help="to read weights (default: %(default)s)")
    add(
        "--lora-overflow",
        choices=["evict", "refuse"],
        default="evict",
        help=(
            "beyond --max-cpu-loras: forget the least recently used weights and read them again when they are asked"
            " for, as vLLM does, or refuse to load (default: %(default)s)"
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
