# SPDX-License-Identifier: Apache-2.0
"""OCI archives of a small base: what is in them, in which order and with which digests; and what deploy/Containerfile
says of the images.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from attache.envoy import VERSION
from extproc.api.gateway_config import GatewayConfigSpec
from tests.programs import program
from tools.image import (
    CONTAINERFILE,
    ImageError,
    base_entries,
    main,
    owned_entries,
    pins,
    read_recipe,
    remove_build_paths,
    tree_entries,
    unlocked,
    write_archive,
    write_layer,
)

ROOT = Path(__file__).parents[2]
RECIPE = read_recipe(CONTAINERFILE.read_text())


def debian(file: Path) -> None:
    """Some entries as mmdebstrap writes them, out of order."""
    with tarfile.open(file, "w") as tar:
        for name, kind, link, owner in (
            ("./", tarfile.DIRTYPE, "", 0),
            ("./usr/bin/zcat", tarfile.REGTYPE, "", 0),
            ("./bin", tarfile.SYMTYPE, "usr/bin", 0),
            ("./dev/null", tarfile.CHRTYPE, "", 0),
            ("./etc/resolv.conf", tarfile.REGTYPE, "", 0),
            ("./usr/bin/gunzip", tarfile.LNKTYPE, "./usr/bin/zcat", 0),
            ("./var/mail", tarfile.DIRTYPE, "", 8),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.gid, info.mtime, info.uname = kind, link, owner, 1_700_000_000, "builder"
            info.size = len(name) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(name.encode()))


def build(folder: Path, name: str = "attache") -> Path:
    """An archive of three layers."""
    folder.mkdir()
    debian(folder / "base.tar")
    tree = folder / "tree"
    (tree / "opt/attache/bin").mkdir(parents=True)
    (tree / "opt/attache/bin/attache").write_text("#!python\n")
    (tree / "opt/attache/bin/attache").chmod(0o700)
    (tree / "opt/attache/bin/python").symlink_to("/usr/bin/python3.11")
    (tree / "opt/attache/umlaut-ä").write_text("x" * 5)
    with tarfile.open(folder / "base.tar") as tar:
        layers = [write_layer(base_entries(tar), folder / "base.layer")]
    image = RECIPE.images["attache"]
    layers += [write_layer(tree_entries(tree), folder / "tree.layer")]
    layers += [write_layer(owned_entries(image.owned), folder / "owned.layer")]
    file = folder / "made.oci.tar"
    write_archive(file, image, name, layers, created_s=86_400, machine="x86_64")
    return file


def blobs(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        members = tar.getmembers()
        assert all(one.isreg() for one in members)
        return {one.name: tar.extractfile(one).read() for one in members}  # type: ignore[union-attr]


def members(layer: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        return tar.getmembers()


def described(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """The blob of a descriptor, which has the size and the digest that it names."""
    kind, _, digest = descriptor["digest"].partition(":")
    content = files[f"blobs/{kind}/{digest}"]
    assert (len(content), hashlib.sha256(content).hexdigest()) == (descriptor["size"], digest)
    return content


def test_an_archive_is_an_oci_layout_whose_digests_and_sizes_are_right(tmp_path: Path) -> None:
    files = blobs(build(tmp_path / "made"))
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(described(files, entry))
    config = json.loads(described(files, manifest["config"]))
    layers = [gzip.decompress(described(files, one)) for one in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    assert len(config["history"]) == len(layers) == 3
    assert (config["architecture"], config["os"], config["created"]) == ("amd64", "linux", "1970-01-02T00:00:00Z")
    assert config["config"] == RECIPE.images["attache"].config()
    # nothing else is in it, and docker finds the same blobs
    (docker,) = json.loads(files["manifest.json"])
    assert docker["Layers"] == [f"blobs/{one['digest'].replace(':', '/')}" for one in manifest["layers"]]
    assert docker["Config"] == f"blobs/{manifest['config']['digest'].replace(':', '/')}"
    assert len(files) == 3 + 2 + len(layers)


def test_layers_hold_files_of_root_at_a_fixed_time_and_nothing_of_the_machine_that_builds(tmp_path: Path) -> None:
    files = blobs(build(tmp_path / "made"))
    (docker,) = json.loads(files["manifest.json"])
    found = [members(gzip.decompress(files[one])) for one in docker["Layers"]]
    base, tree, owned = ([(one.name, one.mode, one.uid, one.gid, one.linkname) for one in part] for part in found)
    assert [(name, gid, link) for name, _, _, gid, link in base] == [
        ("bin", 0, "usr/bin"),
        ("usr/bin/zcat", 0, ""),
        ("var/mail", 8, ""),
        ("usr/bin/gunzip", 0, "usr/bin/zcat"),
    ]
    assert tree == [
        ("opt", 0o755, 0, 0, ""),
        ("opt/attache", 0o755, 0, 0, ""),
        ("opt/attache/bin", 0o755, 0, 0, ""),
        ("opt/attache/bin/attache", 0o755, 0, 0, ""),
        ("opt/attache/bin/python", 0o777, 0, 0, "/usr/bin/python3.11"),
        ("opt/attache/umlaut-ä", 0o644, 0, 0, ""),
    ]
    assert owned == [("bundle", 0o755, 65532, 65532, "")]
    assert {(one.mtime, one.uname, one.gname) for part in found for one in part} == {(315_532_800, "", "")}


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    first, second = build(tmp_path / "first"), build(tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()


def test_pip_leaves_nothing_of_the_directory_into_which_it_installs(tmp_path: Path) -> None:
    wheel = tmp_path / "tool-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tool/__init__.py", "def main() -> None: ...\n")
        packed.writestr("tool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
        packed.writestr("tool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr("tool-1.0.dist-info/entry_points.txt", "[console_scripts]\ntool = tool:main\n")
        packed.writestr("tool-1.0.dist-info/RECORD", "")
    found: list[dict[str, bytes]] = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        own = shutil.copy(wheel, folder)
        words = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--root-user-action=ignore"]
        subprocess.run([sys.executable, "-m", "pip", *words, "--target", folder / "site", own], check=True)
        assert (folder / "site/bin/tool").is_file()
        remove_build_paths(folder / "site")
        files = [one for one in (folder / "site").rglob("*") if one.is_file()]
        found.append({str(one.relative_to(folder)): one.read_bytes() for one in files})
    assert found[0] == found[1]
    assert not [name for name, content in found[0].items() if str(tmp_path).encode() in content]
    record = [line.split(",")[0] for line in found[0]["site/tool-1.0.dist-info/RECORD"].decode().splitlines()]
    assert {f"site/{one}" for one in record} == set(found[0])


@pytest.mark.parametrize(
    ("name", "tagged"),
    [
        ("attache", "attache:latest"),
        ("registry.example/a/attache:0.1.0", "registry.example/a/attache:0.1.0"),
        ("registry.example:5000/attache", "registry.example:5000/attache:latest"),
    ],
)
def test_an_archive_names_its_image(tmp_path: Path, name: str, tagged: str) -> None:
    files = blobs(build(tmp_path / "made", name))
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == tagged
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == tagged.rpartition(":")[2]
    assert json.loads(files["manifest.json"])[0]["RepoTags"] == [tagged]


def test_the_containerfile_says_how_images_start() -> None:
    attache, epp, serve = (RECIPE.images[name] for name in ("attache", "epp", "serve"))
    assert [*RECIPE.images] == ["attache", "epp", "serve"]
    assert attache.user == epp.user == serve.user == "65532:65532"
    assert attache.config()["Env"] == [
        "PATH=/opt/attache/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONUNBUFFERED=1",
    ]
    assert (attache.entrypoint, attache.cmd) == (("attache",), ("--help",))
    assert (epp.entrypoint, epp.copied) == (("attache", "epp"), ("/opt/attache",))
    assert (serve.entrypoint, serve.cmd) == (("attache",), ("serve", "--config", "/config"))
    assert serve.copied == ("/opt/attache", "/opt/envoy")
    assert ("ENVOY", "/opt/envoy/envoy/_bin/envoy") in serve.env
    assert RECIPE.envoy == VERSION
    assert serve.ports[-1] == GatewayConfigSpec().listen.rpartition(":")[2]
    assert set(RECIPE.extras.split(",")) >= {"controller", "redis", "tls"}


@pytest.mark.parametrize(
    "line",
    ["RUN apt-get install jq", "COPY --from=build /etc/x /etc/x", "WORKDIR /src", "RUN mkdir /a && chown 1:1 /b"],
)
def test_a_line_that_only_other_builders_know_is_refused(line: str) -> None:
    text = CONTAINERFILE.read_text().replace("USER 65532:65532\n", f"USER 65532:65532\n{line}\n")
    with pytest.raises(ImageError, match=f"does not know: {re.escape(line)}$"):
        read_recipe(text)


def test_packages_have_the_versions_and_the_hashes_of_the_lock_file() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    found = pins(lock)
    assert f"msgspec=={re.findall(r'^msgspec==(.*?) ', lock, re.MULTILINE)[0]}" in found
    # a package that has a version for each Python says which, else no version would fit
    names = Counter(one.partition("==")[0] for one in found)
    assert [one for one in found if names[one.partition("==")[0]] > 1 and "; python_full_version" not in one] == []
    hashes = re.findall(r"--hash=sha256:(\w+)", lock)

    def installed(name: str, sha256: str) -> dict[str, object]:
        return {"metadata": {"name": name}, "download_info": {"archive_info": {"hashes": {"sha256": sha256}}}}

    report = {"install": [installed("msgspec", hashes[0]), installed("evil", "0" * 64), installed("attache", "1" * 64)]}
    assert unlocked(report, lock) == ["evil"]


def test_the_containerfile_takes_the_same_versions() -> None:
    (line,) = re.findall(
        r"^RUN (sed .*) requirements.lock > /constraints.txt$", CONTAINERFILE.read_text(), re.MULTILINE
    )
    lock = ROOT / "requirements.lock"
    done = subprocess.run([program("bash"), "-c", f"{line} {lock}"], capture_output=True, text=True, check=True)
    assert [one.strip() for one in done.stdout.splitlines()] == pins(lock.read_text())


def test_what_is_missing_for_a_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["attache", "--out", str(tmp_path / "out")]) == 1
    assert "there is no mmdebstrap; apt-get install" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(SystemExit):
        main(["atache"])
    assert "no target atache; there are attache, epp, serve" in capsys.readouterr().err
