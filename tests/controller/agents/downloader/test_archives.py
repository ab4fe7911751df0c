# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from controller.agents.downloader.archives import ArchiveLimits, Member, MemberCheck, Unpacker, walk_files
from controller.agents.downloader.core.errors import ContentRefused
from tests.controller.agents.downloader.downloads import MIB, below, fetched
from tests.controller.agents.downloader.servers import Files, serving

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = os.urandom(300_000)


def tar_with(*members: tuple[str, bytes | None, dict[str, Any]], mode: str = "w") -> bytes:
    """Name, content, and fields of the header."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(info, field, value)
            if content is not None:
                info.size = len(content)
            tar.addfile(info, None if content is None else io.BytesIO(content))
    return out.getvalue()


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> dict[str, Any]:
    return {"type": kind, "linkname": target}


def zip_with(*members: tuple[str, bytes], mode: int = 0o644, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = compression
            file.writestr(info, content)
    return out.getvalue()


async def unpacked(tmp_path: Path, name: str, content: bytes, **more: Any) -> Path:  # noqa: ANN401 - fields of Job
    async with serving(Files({f"/{name}": content}).answer) as host:
        return await fetched(f"http://{host}/{name}", tmp_path / "cache", **more)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
async def test_a_tar_of_a_model_is_unpacked_with_its_links(tmp_path: Path, mode: str) -> None:
    content = tar_with(
        ("./", None, {"type": tarfile.DIRTYPE}),
        ("./llama/config.json", b"{}", {}),
        ("./llama/model.bin", WEIGHTS, {"mode": 0o6755}),
        ("./llama/sub/latest", None, link("../model.bin")),
        ("./llama/copy.bin", None, link("./llama/model.bin", tarfile.LNKTYPE)),
        mode=mode,
    )
    path = await unpacked(tmp_path, "model.tar" + (".gz" if mode == "w:gz" else ""), content)
    assert sorted(str(one.relative_to(path)) for one in walk_files(path)) == [
        "llama/config.json",
        "llama/copy.bin",
        "llama/model.bin",
        "llama/sub/latest",
    ]
    for name in ("model.bin", "sub/latest", "copy.bin"):
        assert (path / "llama" / name).read_bytes() == WEIGHTS
    assert (path / "llama/model.bin").stat().st_mode & 0o7777 == 0o755
    assert list((tmp_path / "cache").rglob("incoming")) == []


async def test_a_zip_and_a_zstd_tar_are_unpacked_and_patterns_choose_in_them(tmp_path: Path) -> None:
    files = (("config.json", b"{}"), ("model.bin", WEIGHTS), ("model.pth", b"old"))
    path = await unpacked(tmp_path, "m.zip", zip_with(*files), wanted={"ignore": ("*.pth",)})
    assert {one.name: one.read_bytes() for one in path.iterdir()} == dict(files[:2])
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(tar_with(*((name, content, {}) for name, content in files)))
    path = await unpacked(tmp_path, "m.tar.zst", packed)
    assert {one.name: one.read_bytes() for one in path.iterdir()} == dict(files)


async def test_an_archive_stays_as_it_is_if_asked_to(tmp_path: Path) -> None:
    content = zip_with(("config.json", b"{}"))
    path = await unpacked(tmp_path, "m.zip", content, wanted={"unpack": False})
    assert [one.name for one in path.iterdir()] == ["m.zip"]


MALICIOUS = {
    "upwards": tar_with(("../evil", b"x", {})),
    "upwards within": tar_with(("a/../../evil", b"x", {})),
    "absolute": tar_with(("/evil", b"x", {})),
    "absolute link": tar_with(("l", None, link("/etc"))),
    "link upwards": tar_with(("a/l", None, link("../../evil"))),
    "link through a link": tar_with(("d/deep", None, link("../e/f")), ("x", None, link("d/deep/../../../evil"))),
    "write through a link": tar_with(("here", None, link(".")), ("here/evil", b"x", {})),
    "directory over a link": tar_with(
        ("l", None, link("a")), ("l", None, {"type": tarfile.DIRTYPE}), ("l/evil", b"x", {})
    ),
    "link over a directory": tar_with(("d/x", b"x", {}), ("d", None, link("e"))),
    "hard link outside": tar_with(("h", None, link("/etc/passwd", tarfile.LNKTYPE))),
    "hard link upwards": tar_with(("h", None, link("../../evil", tarfile.LNKTYPE))),
    "hard link to a link": tar_with(("l", None, link("a")), ("h", None, link("l", tarfile.LNKTYPE))),
    "device": tar_with(("null", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})),
    "fifo": tar_with(("pipe", None, {"type": tarfile.FIFOTYPE})),
    "no name": tar_with(("./", b"x", {})),
    "too long": tar_with(("n" * 300, b"x", {})),
    "cut short": tar_with(("m.bin", WEIGHTS, {}))[:1000],
    "no tar": b"no tar at all " * 100,
}


@pytest.mark.parametrize("name", MALICIOUS)
async def test_a_malicious_tar_writes_nothing_outside_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    good = ("good.bin", b"good", {})
    with pytest.raises(ContentRefused):
        await unpacked(tmp_path, "m.tar", MALICIOUS[name])
    assert [one.name for one in below(tmp_path) if "evil" in one.name] == []
    left = [one for one in below(tmp_path / "cache") if one.is_file() and one.parent.name not in ("locks", "answers")]
    assert left == []
    # the same directory still serves what is good
    await unpacked(tmp_path, "m.tar", tar_with(good))


@pytest.mark.parametrize(
    "content",
    [
        zip_with(("../evil", b"x")),
        zip_with(("/evil", b"x")),
        zip_with(("a\\..\\evil", b"x")),
        zip_with(("link", b"/etc"), mode=0o120777),
        zip_with(("m.bin", WEIGHTS))[:-100],
        zip_with(("m.bin", WEIGHTS)).replace(WEIGHTS[:0] + b"m.bin", b"n.bin", 1),
    ],
    ids=["upwards", "absolute", "backslashes", "link", "cut short", "two names"],
)
async def test_a_malicious_zip_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ContentRefused):
        await unpacked(tmp_path, "m.zip", content)
    assert [one.name for one in below(tmp_path) if "evil" in one.name or one.is_symlink()] == []


@pytest.mark.parametrize("kind", ["m.zip", "m.tar.gz"])
async def test_an_archive_that_unpacks_to_too_much_for_its_size_is_a_bomb(tmp_path: Path, kind: str) -> None:
    zeros = bytes(8 * MIB)
    bomb = zip_with(("m.bin", zeros)) if kind == "m.zip" else tar_with(("m.bin", zeros, {}), mode="w:gz")
    assert len(bomb) < 20_000
    with pytest.raises(ContentRefused, match="times its size"):
        await unpacked(tmp_path, kind, bomb, limits=ArchiveLimits(ratio_from=MIB))
    assert sum(one.stat().st_size for one in below(tmp_path) if one.is_file()) < 2 * MIB
    await unpacked(tmp_path, kind, bomb)  # the default allows small archives of zeros


async def test_size_and_members_of_an_archive_are_limited(tmp_path: Path) -> None:
    many = tar_with(*((f"a/{number}", b"", {}) for number in range(20)))
    with pytest.raises(ContentRefused, match="more than 15 members"):
        await unpacked(tmp_path, "m.tar", many, limits=ArchiveLimits(members=15))
    with pytest.raises(ContentRefused, match="unpacks to more than 1000 bytes"):
        await unpacked(tmp_path, "m.tar", tar_with(("m.bin", WEIGHTS, {})), limits=ArchiveLimits(size=1000))


def test_directories_that_names_only_imply_count_as_members() -> None:
    members = MemberCheck(ArchiveLimits(members=100))
    for number in range(4):
        members.checked_destination(Member(f"{number}/" + "/".join("x" * 20), "file"))
    with pytest.raises(ContentRefused, match="more than 100 members"):
        members.checked_destination(Member("5/" + "/".join("x" * 20), "file"))


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type = tarfile.GNUTYPE_LONGNAME
    header.size = 64 * MIB
    archive = tmp_path / "m.tar"
    with archive.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(65 * MIB)
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        with pytest.raises(ContentRefused, match="a header of"):
            Unpacker(tmp_path / "out", ArchiveLimits(), lambda: False).unpack(archive, "tar")
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_many_members_are_unpacked_in_bounded_memory(tmp_path: Path) -> None:
    archive = tmp_path / "m.tar"
    with tarfile.open(archive, "w") as tar:
        for number in range(40):
            info = tarfile.TarInfo(f"m-{number}.bin")
            info.size = MIB
            tar.addfile(info, io.BytesIO(bytes(MIB)))
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        Unpacker(tmp_path / "out", ArchiveLimits(), lambda: False).unpack(archive, "tar")
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
    assert len(list((tmp_path / "out").iterdir())) == 40


def test_a_zip_of_nothing_but_names_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    """Such a table of contents needs ten times its size in memory."""
    name = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    table = name * 400_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(table), 0, 0)
    archive = tmp_path / "model.zip"
    archive.write_bytes(table + end)
    with pytest.raises(ContentRefused, match=f"table of contents of {len(table)} bytes"):
        Unpacker(tmp_path / "out", ArchiveLimits(), lambda: False).unpack(archive, "zip")
