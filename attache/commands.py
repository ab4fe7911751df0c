# SPDX-License-Identifier: Apache-2.0
"""The commands by name: where the program of each is, and which extra of the package it needs."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


class Program(Protocol):
    """What a command's module offers."""

    def parser(self, prog: str) -> argparse.ArgumentParser:
        """The command's options; ``prog`` is what its help calls it."""
        ...

    def main(self, words: list[str], prog: str) -> int:
        """Run the command; returns the exit status."""
        ...


class Command(NamedTuple):
    """``module`` is imported only when the command is run, because some take half a second."""

    name: str
    summary: str
    module: str
    extra: str = ""
    needs_envoy: bool = False
    # options that the program does not know are passed on to another one
    passes_options: bool = False

    def load(self) -> Program:
        """The module itself, or the entry of its ``PROGRAMS``; raises ModuleNotFoundError without its extra."""
        module = import_module(self.module)
        programs = getattr(module, "PROGRAMS", None)
        return cast("Program", module if programs is None else programs[self.name])


GROUPS: Final[Mapping[str, tuple[Command, ...]]] = MappingProxyType(
    {
        "Serve": (
            Command(
                "extproc", "serve Envoy's ext_proc protocol: choose an engine for every request", "extproc.cli.serve"
            ),
            Command(
                "bundle",
                "write Envoy's configuration, and keep it up to date",
                "controller.bundle_command",
                "controller",
            ),
            Command(
                "gateway",
                "follow a cluster's objects, and write them as a configuration directory",
                "attache.cluster_commands",
                "controller",
            ),
            Command(
                "epp",
                "serve an InferencePool as an endpoint picker, with llm-d's flags",
                "attache.cluster_commands",
                "controller",
                passes_options=True,
            ),
            Command(
                "manager", "check objects when they are applied to a cluster", "attache.cluster_commands", "controller"
            ),
            Command("download", "have a model's weights on this node", "controller.download_command", "weights"),
            Command("agent", "run beside an engine: readiness, drain, adapters, metrics", "controller.agent_command"),
            Command("envoy", "run Envoy, or fetch it", "attache.envoy", passes_options=True),
        ),
        "Look inside": (
            Command("check", "report every mistake in a configuration directory", "extproc.cli.check"),
            Command("render", "print what a cluster's objects compile to", "attache.cluster_commands", "controller"),
            Command(
                "convert", "print objects of llm-d's and Kthena's autoscalers as ours", "controller.convert_command"
            ),
            Command("explain", "explain where a request would go", "extproc.cli.explain"),
            Command("explain-scaling", "explain why there are so many engines", "controller.explain_scaling_command"),
            Command("top", "show engines, queues and tenants live", "extproc.cli.top"),
        ),
        "Try without a GPU": (
            Command("engine", "simulate one vLLM engine, or several", "bench.engine.__main__"),
            Command(
                "up",
                "start Envoy, extproc and simulated engines on this machine",
                "bench.up",
                "bench",
                needs_envoy=True,
            ),
            Command(
                "run", "compare policies under load on such a machine", "bench.live.run", "bench", needs_envoy=True
            ),
        ),
        "Compare policies": (
            Command("replay", "compare policies on a trace, in virtual time", "bench.__main__", "bench"),
            Command("compare", "compare two replays request by request", "bench.__main__", "bench"),
            Command("workload", "describe a trace or a generator", "bench.__main__", "bench"),
            Command("lab", "compare many policies on two traces at three loads", "bench.__main__", "bench"),
            Command("autoscale", "compare autoscalers on the same loads", "bench.__main__", "bench"),
            Command("validate", "compare the simulated engine with real ones", "bench.__main__", "bench"),
            Command("bench", "measure what extproc costs a request", "bench.micro.__main__", "bench", needs_envoy=True),
        ),
        "Shell": (Command("completion", "print a completion script for bash, zsh or fish", "attache.completion"),),
    }
)

COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {command.name: command for commands in GROUPS.values() for command in commands}
)
