# SPDX-License-Identifier: Apache-2.0
"""The simulator behind vLLM's command line, for pods whose image is vLLM's

Flags that the simulator has are kept, names are translated, and what only a GPU needs is dropped, so that the pods that
controllers make run as they are. ``SIMULATOR_ARGS`` holds further options of the simulator.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Final, get_args

from bench.engine.__main__ import main
from bench.engine.kv_connectors import Connector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# vLLM's flags by what they are here.
_SAME: Final = (
    *("--port", "--host", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size"),
    *("--max-loras", "--max-cpu-loras", "--max-lora-rank"),
)
_ALONE: Final = "--enable-lora"
_MODEL: Final = "--model"
_NAME: Final = "--served-model-name"
_EVENTS: Final = "--kv-events-config"
_TRANSFERS: Final = "--kv-transfer-config"
# Where an engine gives KV caches to others: what its variables begin with, and the port without them.
_NIXL: Final = ("VLLM_NIXL_SIDE_CHANNEL", "5600")
_SIDE_CHANNELS: Final = {
    "MooncakeConnector": ("VLLM_MOONCAKE_BOOTSTRAP", "8998"),
    "OffloadingConnector": ("VLLM_P2P_SIDE_CHANNEL", "5710"),
}


def translate_arguments(words: Sequence[str]) -> list[str]:
    """The simulator's options. Flags are ``--name=value``, as presets of engines write them, or two words; the model
    may also stand alone, as in ``vllm serve MODEL``.
    """
    pairs = list(_pairs(words))
    named = [option for flag, value in pairs for option in _one(flag, value)]
    # an engine without a name of its own for the model serves it under the model's, as vLLM does
    known = dict(pairs)
    name = (known.get(_NAME, "").split() or [known.get(_MODEL, "")])[0]
    return [*named, f"{_MODEL}={name}"] if name else named


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags with their values; of a list of values, the first."""
    flag = _MODEL
    for word in words:
        if word.startswith("--"):
            if flag not in {"", _MODEL}:
                yield flag, ""
            flag, has_value, value = word.partition("=")
            if has_value:
                yield flag, value
                flag = ""
        elif flag and word != "serve":
            yield flag, word
            flag = ""
    if flag not in {"", _MODEL}:
        yield flag, ""


def _one(flag: str, value: str) -> Iterator[str]:
    if flag in _SAME:
        yield f"{flag}={value}"
    elif flag == _ALONE:
        yield flag
    elif flag == _EVENTS:
        config = json.loads(value)
        for name, option in (("endpoint", "--kv-events-port"), ("replay_endpoint", "--kv-replay-port")):
            if config.get(name):
                yield f"{option}={config[name].rpartition(':')[2]}"
    elif flag == _TRANSFERS and json.loads(value).get("kv_connector") in get_args(Connector):
        yield f"{_TRANSFERS}={value}"
        variables, port = _SIDE_CHANNELS.get(json.loads(value)["kv_connector"], _NIXL)
        yield f"--side-channel-port={os.environ.get(f'{variables}_PORT', port)}"
        if host := os.environ.get(f"{variables}_HOST"):
            yield f"--side-channel-host={host}"


def listen_host() -> str:
    """The pod's address where pods share this machine's, and all addresses where each has a network of its own."""
    pod = os.environ.get("ATTACHE_POD_IP", "")
    return pod if pod.startswith("127.") else "0.0.0.0"  # noqa: S104 - of the pod's own network


if __name__ == "__main__":
    own = shlex.split(os.environ.get("SIMULATOR_ARGS", ""))
    sys.exit(main([f"--host={listen_host()}", *own, *translate_arguments(sys.argv[1:])], prog="vllm"))
