# SPDX-License-Identifier: Apache-2.0
"""What a make target is about to fetch and build, and what would stop it in the end: told before it begins.

It runs before there is a virtual environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
_OLDEST = (3, 11)
_LISTEN = "127.0.0.1:8080"
# What each target needs, in the order in which it is made.
TARGETS = {
    "run": ("venv", "envoy"),
    "up": ("venv", "envoy"),
    "up-kube": ("venv", "envoy", "kube"),
    "kube-assets": ("venv", "kube"),
    "conformance": ("venv", "envoy", "kube", "suites"),
    "test-kube-real": ("venv", "envoy", "kube"),
    "test-conformance": ("venv", "envoy", "kube", "suites"),
    "test-vllm": ("venv", "envoy", "vllm"),
    "test-model-servers": ("venv", "envoy", "mlserver", "kserve"),
    "image-archive": ("venv",),
    "test-image": ("venv",),
}


class Preparation(NamedTuple):
    """Something that is made once, at ``path``. ``takes``: on two cores. ``disk_gb``: here. ``cache_gb``: in the caches
    of Go, which builds it; 0: it is fetched.
    """

    what: str
    path: Path
    takes: str
    disk_gb: float
    cache_gb: float = 0.0


def steps(root: Path, environment: Mapping[str, str]) -> dict[str, Preparation]:
    """All of them by name. ``environment``: may say where Envoy and Kubernetes are."""
    import tomllib  # noqa: PLC0415 - an older Python has none, and gets a message instead

    pinned = tomllib.loads((ROOT / "bench/cluster/versions.toml").read_text())
    kubernetes, suites = pinned["kubernetes"], pinned["gateway-api"]
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    assets = environment.get("KUBEBUILDER_ASSETS") or cache / "attache" / f"kube-{kubernetes}"
    return {
        "venv": Preparation("the Python packages", root / ".venv/ready", "1 to 3 minutes", 0.7),
        "envoy": Preparation("Envoy", root / (environment.get("ENVOY") or ".tools/envoy"), "a minute", 0.15),
        "kube": Preparation(
            f"Kubernetes {kubernetes} and etcd, built with Go", root / assets, "10 to 30 minutes", 0.4, 4.2
        ),
        "suites": Preparation(
            "the conformance suites, built with Go", root / f".tools/conformance-{suites}", "5 to 10 minutes", 0.5, 1.0
        ),
        "vllm": Preparation("vLLM and torch", root / ".venv-vllm/ready", "5 to 15 minutes", 6.0),
        "mlserver": Preparation("MLServer", root / ".venv-mlserver/ready", "1 to 3 minutes", 0.4),
        "kserve": Preparation("KServe's SDK", root / ".venv-kserve/ready", "1 to 3 minutes", 0.5),
    }


def problems(
    target: str, words: Sequence[str], missing: Sequence[Preparation], environment: Mapping[str, str]
) -> Iterator[str]:
    """What would stop the target, each with what to do. ``words``: its ARGS. ``missing``: what it has to make first."""
    from bench.cluster.netns import NoNamespace, unshare_command  # noqa: PLC0415 - as tomllib
    from tools.go_modules import toolchain_missing  # noqa: PLC0415 - as tomllib

    needs_suites = "suites" in TARGETS[target]
    built = [one for one in missing if one.cache_gb]
    lacks_go = toolchain_missing() if built else ""
    if lacks_go:
        given = "etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl"
        other = "" if needs_suites else f"; or set KUBEBUILDER_ASSETS to a directory with {given}"
        yield f"{lacks_go}: see https://go.dev/doc/install{other}"
    yield from _lacking_space(missing, [] if lacks_go else built)
    yield from _lacking_assets(environment.get("KUBEBUILDER_ASSETS", ""), TARGETS[target])
    if "image" in target and shutil.which("mmdebstrap") is None:
        yield "there is no mmdebstrap: `apt-get install --no-install-recommends mmdebstrap`; or start docker or podman"
    if needs_suites or "--own-network" in words:
        try:
            unshare_command()
        except NoNamespace as error:
            yield str(error)
    if target in {"up", "up-kube"} and not {"--bare", "--own-network"} & {*words}:
        listen = next((after for word, after in pairwise(words) if word == "--listen"), _LISTEN)
        other = ", or write ARGS='--listen 127.0.0.1:PORT'" if target == "up" else ""
        if not _is_free(listen):
            yield f"{listen} is in use, where Envoy is to listen: end what listens there (`ss -ltnp` names it){other}"


def _lacking_space(missing: Sequence[Preparation], built: Sequence[Preparation]) -> Iterator[str]:
    """By file system: the caches of Go may be on another one."""
    needed = {ROOT: sum(one.disk_gb for one in missing)}
    if built:
        from tools.go_modules import run_go  # noqa: PLC0415 - as tomllib

        cache = next(one for one in (Path(run_go(["env", "GOCACHE"]).strip()), Path.home(), ROOT) if one.exists())
        needed[cache] = sum(one.cache_gb for one in built)
    by_device: dict[int, list[Path]] = {}
    for path in needed:
        by_device.setdefault(path.stat().st_dev, []).append(path)
    for paths in by_device.values():
        wanted_gb, free_gb = sum(needed[one] for one in paths), shutil.disk_usage(paths[0]).free / 1e9
        if free_gb < wanted_gb:
            where = " and ".join(map(str, paths))
            yield f"{wanted_gb:.1f} GB are needed in {where}, and {free_gb:.1f} GB are free"


def _lacking_assets(given: str, needs: Sequence[str]) -> Iterator[str]:
    if given and "kube" in needs:
        names = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (Path(given) / name).is_file()]
        if names:
            yield f"KUBEBUILDER_ASSETS is {given}, which has no {' and no '.join(names)}; unset it to build them"


def _is_free(listen: str) -> bool:
    host, _, port = listen.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, ValueError, OverflowError):
            return False
    return True


def main(arguments: Sequence[str]) -> int:
    """TARGET and its ARGS. Exit status: 0 if it can begin, 2 if something would stop it."""
    target, *words = arguments
    if sys.version_info < _OLDEST:
        print("Attaché needs Python 3.11 or newer: make PYTHON=python3.12 ...", file=sys.stderr)
        return 2
    known = steps(ROOT, os.environ)
    missing = [known[name] for name in TARGETS[target] if not known[name].path.exists()]
    found = list(problems(target, words, missing, os.environ))
    if found:
        print(f"make {target} cannot begin:", *found, sep="\n  - ", file=sys.stderr)
        return 2
    if missing:
        print(f"make {target} makes first, once:")
        for one in missing:
            cached = f", and {one.cache_gb:g} GB in Go's caches" if one.cache_gb else ""
            print(f"  {one.what}: {one.takes}, {one.disk_gb:g} GB{cached}")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
