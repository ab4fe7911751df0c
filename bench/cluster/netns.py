# SPDX-License-Identifier: Apache-2.0
"""A network of its own for a whole cluster: a namespace with a bridge and nothing else.

``python -m bench.cluster.netns WORDS...`` runs a command in it. There pods have addresses that the API server takes in
EndpointSlices (it refuses 127/8), network namespaces of their own, so that each may listen on every port, and Gateways
and Services have addresses and port 80. Nothing leaves the machine: the namespace has no way out.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BRIDGE: Final = "attache0"
RANGE: Final = "10.88.0.0/16"
SERVICE_RANGE: Final = "10.0.0.0/16"
_VARIABLE: Final = "ATTACHE_POD_RANGE"
# a user namespace too: no right is needed where users may make them
_WAYS: Final = (("unshare", "--user", "--map-root-user", "--net"), ("unshare", "--net"))
_PROGRAMS: Final = ("unshare", "nsenter", "ip")
# a proxy outside cannot be reached, and clients would use it for the API server
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class NoNamespace(Exception):
    """This machine permits no network namespace; the message says what to do."""


def pod_range(environment: Mapping[str, str] = os.environ) -> str | None:
    """The range of addresses for pods if this process is in such a network."""
    return environment.get(_VARIABLE) or None


def host_address(range_: str) -> str:
    """The address of the bridge, which is that of the nodes: the first of the range."""
    return str(ipaddress.IPv4Network(range_)[1])


def gateway_range(range_: str) -> str:
    """The addresses for Gateways: the last 256 of the range."""
    return str(list(ipaddress.IPv4Network(range_).subnets(new_prefix=24))[-1])


def unshare_command() -> tuple[str, ...]:
    """The words that run a command in a namespace of its own; raises NoNamespace."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoNamespace(f"no {' and no '.join(missing)}: install the packages util-linux and iproute2")
    message = ""
    for words in _WAYS:
        done = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return words
        message = message or done.stderr.strip()
    raise NoNamespace(
        f"this machine permits no network namespace ({message}). Run this as root, or let users make them: "
        "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), "
        "`sysctl -w user.max_user_namespaces=15000`; in a container: `--privileged`, or `--cap-add SYS_ADMIN,NET_ADMIN`"
    )


def network_setup_commands(range_: str) -> list[str]:
    """What ``ip`` does in the new namespace."""
    network = ipaddress.IPv4Network(range_)
    return [
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {network[1]}/{network.prefixlen} dev {BRIDGE}",
        f"link set {BRIDGE} up",
        # so that a proxy can listen on each of them
        f"route add local {gateway_range(range_)} dev lo",
        f"route add local {SERVICE_RANGE} dev lo",
    ]


def run_in_namespace(words: Sequence[str], range_: str = RANGE) -> None:
    """Replace this process by ``words``, run in a new network; raises NoNamespace and OSError."""
    inner = [sys.executable, "-m", "bench.cluster.netns", "--range", range_, "--inside", *words]
    arguments = [*unshare_command(), "--", *inner]
    os.execvp(arguments[0], arguments)  # noqa: S606 - no shell


def main(arguments: list[str] | None = None) -> int:
    """Exit status: that of the command, 2 if there can be no such network."""
    made = argparse.ArgumentParser(
        prog="bench.cluster.netns",
        description="Run a command in a network namespace with a bridge for pods and nothing else.",
        epilog="Exit status: that of the command, 2 if this machine permits no network namespace.",
    )
    made.add_argument("--range", default=RANGE, metavar="CIDR", help="addresses of pods (default: %(default)s)")
    made.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("words", nargs=argparse.REMAINDER, metavar="WORDS", help="the command")
    options = made.parse_args(arguments)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    try:
        if not options.inside:
            run_in_namespace(words, options.range)
        _run(words, options.range)
    except (NoNamespace, OSError, subprocess.CalledProcessError) as error:
        print(f"netns: {error}", file=sys.stderr)
    return 2


def _run(words: Sequence[str], range_: str) -> None:
    """Set the new namespace up and become the command."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(network_setup_commands(range_)), text=True, check=True)  # noqa: S607
    inherited = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
    os.execvpe(words[0], list(words), {**inherited, _VARIABLE: range_})  # noqa: S606 - no shell


if __name__ == "__main__":
    sys.exit(main())
