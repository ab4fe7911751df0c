# SPDX-License-Identifier: Apache-2.0
"""Images that ``make test-image`` has built, unpacked as a container runtime does it: read-only, as the image's user,
and in a network of its own.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.programs import not_tested, program

BUILT = Path(__file__).parents[2] / "build"


class Container(NamedTuple):
    """An image's files in a directory, and its configuration."""

    root: Path
    config: dict[str, Any]

    def run(self, script: str, mounts: str = "true") -> subprocess.CompletedProcess[str]:
        """Run a script of sh in it. ``mounts``: what is mounted first; $ROOT is the directory."""
        settings = self.config["config"]
        # HOME is what runtimes give to a user without an entry in /etc/passwd
        inner = ["env", "-i", "HOME=/", *settings["Env"], "sh", "-euc", script]
        steps = f"""
            mount --make-rprivate /; ip link set lo up
            mount --bind "$ROOT" "$ROOT"; {mounts.strip()}
            mount -t tmpfs tmpfs "$ROOT/tmp"; mount --rbind /dev "$ROOT/dev"
            mount -t proc proc "$ROOT/proc"; mount -o remount,bind,ro "$ROOT"
            exec chroot --userspec={settings["User"]} "$ROOT" {shlex.join(inner)}
        """
        words = [program("unshare"), "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", steps]
        environment = {"PATH": os.environ["PATH"], "ROOT": str(self.root)}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=250)


def unpack(archive: Path, root: Path) -> Container:
    """Raises if a blob is missing: digests are the tests' of tests/tools."""
    with tarfile.open(archive) as outer:

        def read(name: str) -> bytes:
            found = outer.extractfile(name)
            assert found is not None
            return found.read()

        (docker,) = json.loads(read("manifest.json"))
        for layer in docker["Layers"]:
            with tarfile.open(fileobj=io.BytesIO(read(layer))) as tar:
                tar.extractall(root, filter="fully_trusted")  # noqa: S202 - our own
        return Container(root, json.loads(read(docker["Config"])))


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Container]:
    """By target; skipped, loudly, where they were not built or cannot be run."""
    files = {name: BUILT / f"{name}.oci.tar" for name in ("attache", "attache-epp", "attache-serve")}
    if missing := [str(one) for one in files.values() if not one.is_file()]:
        not_tested("IMAGES", f"there is no {' and no '.join(missing)}; `make test-image` builds them")
    if os.geteuid():
        not_tested("IMAGES", "layers belong to other users: run this as root")
    command = [program("unshare"), "--net", "--mount", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        not_tested("NAMESPACES", f"{done.stderr.strip()}: run this as root; in a container, with `--privileged`")
    folder = tmp_path_factory.mktemp("containers")
    return {name: unpack(file, folder / name) for name, file in files.items()}
