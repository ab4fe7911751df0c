# SPDX-License-Identifier: Apache-2.0
"""The commands by name: where the program of each is, and which extra of the package it needs."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


class CommandModule(Protocol):
    """What a command's module offers."""

    def parser(self, prog: str) -> argparse.ArgumentParser:
        """The command's options; ``prog`` is what its help calls it."""
        ...

    def main(self, words: list[str], prog: str) -> int:
        """Run the command; returns the exit status."""
        ...


class Command(NamedTuple):
    """``module`` is imported only when the command is run, because some take half a second.

    ``example``: what follows the name in a typical call.
    """

    name: str
    summary: str
    module: str
    example: str
    extra: str = ""
    needs_envoy: bool = False
    # options that the program does not know are passed on to another one
    passes_options: bool = False
    # the first word selects what is done, and each has options of its own
    has_modes: bool = False

    def load(self) -> CommandModule:
        """The module itself, or the entry of its ``PROGRAMS``; raises ModuleNotFoundError without its extra."""
        module = import_module(self.module)
        programs = getattr(module, "PROGRAMS", None)
        return cast("CommandModule", module if programs is None else programs[self.name])


GROUPS: Final[Mapping[str, tuple[Command, ...]]] = MappingProxyType(
    {
        "Serve": (
            Command(
                "init",
                "write a first configuration directory, with comments, for engines that run",
                "attache.init",
                "config --engine 127.0.0.1:8001 --key acme",
            ),
            Command(
                "serve",
                "run extproc, the bundle's writer and Envoy together, on one machine",
                "attache.serve",
                "--config config",
                "controller",
            ),
            Command(
                "extproc",
                "serve Envoy's ext_proc protocol: choose an engine for every request",
                "extproc.cli.serve",
                "--config config --listen 127.0.0.1:9002",
            ),
            Command(
                "bundle",
                "write Envoy's configuration, and keep it up to date",
                "controller.commands.bundle",
                "--config config --out bundle --watch",
                "controller",
            ),
            Command(
                "translate",
                "translate requests and answers between APIs, for Envoy on the same machine",
                "extproc.cli.translate",
                "--bundle bundle",
            ),
            Command(
                "gateway",
                "follow a cluster's objects, and write them as a configuration directory",
                "attache.cluster_commands",
                "--config /run/attache/config",
                "controller",
            ),
            Command(
                "epp",
                "serve an InferencePool as an endpoint picker, with llm-d's flags",
                "attache.cluster_commands",
                "--pool-name llama --pool-namespace default",
                "controller",
                passes_options=True,
            ),
            Command(
                "manager",
                "run Models, their rollouts and autoscaling; check objects when they are applied",
                "attache.cluster_commands",
                "--metrics 127.0.0.1:9006",
                "controller",
            ),
            Command(
                "usage",
                "keep what requests used and cost, and report it",
                "controller.commands.usage",
                "serve --log /var/lib/attache/usage.log --store sqlite:////var/lib/attache/usage.db",
                "usage",
                has_modes=True,
            ),
            Command(
                "keys",
                "make, list, rotate and revoke virtual API keys",
                "controller.commands.keys",
                "create acme-web --tenant acme --config config --expires 90d",
                has_modes=True,
            ),
            Command(
                "download",
                "have a model's weights on this node",
                "controller.commands.download",
                "hf://meta-llama/Llama-3.1-8B --cache /models --link /models/llama",
                "weights",
            ),
            Command(
                "agent",
                "run beside an engine: readiness, drain, adapters, metrics",
                "controller.commands.agent",
                "--engine http://127.0.0.1:8000 --model llama",
            ),
            Command(
                "envoy", "run Envoy, or fetch it", "attache.envoy", "-c bundle/bootstrap.json", passes_options=True
            ),
        ),
        "Look inside": (
            Command("check", "report every mistake in a configuration directory", "extproc.cli.check", "config"),
            Command(
                "render",
                "print what a cluster's objects compile to",
                "attache.cluster_commands",
                "objects.yaml --out config",
                "controller",
            ),
            Command(
                "convert",
                "print objects of llm-d's and Kthena's autoscalers as ours",
                "controller.commands.convert",
                "policies.yaml > converted.yaml",
            ),
            Command(
                "explain", "explain where a request would go", "extproc.cli.explain", "--config config request.json"
            ),
            Command(
                "explain-scaling",
                "explain why there are so many engines",
                "controller.commands.explain_scaling",
                "default/llama --last 5",
            ),
            Command("reset", "close the breakers of a ModelServer", "extproc.cli.reset", "default/llama"),
            Command("slo", "show how well objectives are kept", "extproc.cli.slo", "127.0.0.1:9003"),
            Command("top", "show engines, queues and tenants live", "extproc.cli.top", "127.0.0.1:9003"),
        ),
        "Try without a GPU": (
            Command(
                "engine",
                "simulate one vLLM engine, or several",
                "bench.engine.__main__",
                "--port 8001 --model llama",
            ),
            Command(
                "up",
                "start Envoy, extproc and simulated engines on this machine",
                "bench.stack.__main__",
                "--engines 4",
                "bench",
                needs_envoy=True,
            ),
            Command(
                "run",
                "compare policies under load on such a machine",
                "bench.live.run",
                "--engines 4",
                "bench",
                needs_envoy=True,
            ),
        ),
        "Compare policies": (
            Command(
                "replay",
                "compare policies on a trace, in virtual time",
                "bench.__main__",
                "--trace conversation_trace.jsonl --policies attache,round-robin",
                "bench",
            ),
            Command(
                "compare", "compare two replays request by request", "bench.__main__", "before.json after.json", "bench"
            ),
            Command(
                "workload",
                "describe a trace or a generator",
                "bench.__main__",
                "--trace conversation_trace.jsonl",
                "bench",
            ),
            Command(
                "lab",
                "compare many policies on two traces at three loads",
                "bench.__main__",
                "--traces traces --out lab-out",
                "bench",
            ),
            Command(
                "autoscale",
                "compare autoscalers on the same loads",
                "bench.__main__",
                "--traces traces --out autoscale-out",
                "bench",
            ),
            Command(
                "validate", "compare the simulated engine with real ones", "bench.__main__", "--traces traces", "bench"
            ),
            Command(
                "bench",
                "measure what extproc costs a request",
                "bench.micro.__main__",
                "--quick --only 2KB",
                "bench",
                needs_envoy=True,
            ),
        ),
        "Shell": (
            Command("completion", "print a completion script for bash, zsh or fish", "attache.completion", "bash"),
        ),
    }
)

COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {command.name: command for commands in GROUPS.values() for command in commands}
)
