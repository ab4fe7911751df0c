# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.agents.downloader.core.errors import AccessRefused, ChecksumMismatch, SourceNotFound
from controller.agents.downloader.core.fetch_plan import Checksum
from controller.agents.downloader.sources.buckets import s3_checksum
from tests.controller.agents.downloader.downloads import MIB, command, fetched, random_bytes
from tests.controller.agents.downloader.s3_server import S3Server, s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = random_bytes(6 * MIB)
DIGEST = "d41d8cd98f00b204e9800998ecf8427e"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.put("models", "llama/config.json", b"{}")
        server.put("models", "llama/sub/model.bin", LARGE[:MIB])
        server.put("models", "llama-2/other.bin", b"other")
        yield server


async def test_a_folder_of_a_bucket_comes_with_checksums_and_its_neighbour_does_not(
    tmp_path: Path, s3: S3Server
) -> None:
    path = await fetched("s3://models/llama", tmp_path, s3.environment)
    assert (path / "config.json").read_bytes() == b"{}"
    assert (path / "sub/model.bin").read_bytes() == LARGE[:MIB]
    marker = json.loads((path.parent / "ready.json").read_text())
    assert {one["path"] for one in marker["files"]} == {"config.json", "sub/model.bin"}
    assert all(one["checksum"] for one in marker["files"])
    one = await fetched("s3://models/llama/sub/model.bin", tmp_path, s3.environment)
    assert (one / "model.bin").stat().st_size == MIB


async def test_the_etag_of_an_upload_in_parts_is_a_checksum_too(tmp_path: Path, s3: S3Server) -> None:
    s3.make("parts")
    upload = s3.client.create_multipart_upload(Bucket="parts", Key="m/m.bin")["UploadId"]
    done = []
    for number, start in enumerate((0, 5 * MIB), start=1):
        body = LARGE[start : start + 5 * MIB]
        where = {"Bucket": "parts", "Key": "m/m.bin", "UploadId": upload, "PartNumber": number}
        done.append({"PartNumber": number, "ETag": s3.client.upload_part(Body=body, **where)["ETag"]})
    s3.client.complete_multipart_upload(Bucket="parts", Key="m/m.bin", UploadId=upload, MultipartUpload={"Parts": done})
    path = await fetched("s3://parts/m", tmp_path, s3.environment)
    assert (path / "m.bin").read_bytes() == LARGE
    (kept,) = json.loads((path.parent / "ready.json").read_text())["files"]
    assert kept["checksum"].startswith("md5-parts:")


async def test_a_newer_object_is_another_entry_and_the_old_one_stays(tmp_path: Path, s3: S3Server) -> None:
    s3.put("changes", "m/m.bin", b"one")
    old = await fetched("s3://changes/m", tmp_path, s3.environment)
    s3.put("changes", "m/m.bin", b"two")
    new = await fetched("s3://changes/m", tmp_path, s3.environment)
    assert ((old / "m.bin").read_bytes(), (new / "m.bin").read_bytes()) == (b"one", b"two")


async def test_a_bucket_a_prefix_or_credentials_that_are_not_there_are_said(tmp_path: Path, s3: S3Server) -> None:
    for uri in ("s3://nobody/x", "s3://models/none"):
        with pytest.raises(SourceNotFound):
            await fetched(uri, tmp_path, s3.environment)
    refused = await command("s3://models/llama", "--cache", str(tmp_path), AWS_ENDPOINT_URL_S3=f"http://{s3.host}")
    _, errors = await refused.communicate()
    assert refused.returncode == AccessRefused.exit_status
    assert "there are no credentials" in errors.decode()


async def test_a_wrong_checksum_of_an_object_is_refused(tmp_path: Path, s3: S3Server) -> None:
    wrong = (("config.json", hashlib.sha256(b"[]").hexdigest()),)
    with pytest.raises(ChecksumMismatch, match=r"config\.json"):
        await fetched("s3://models/llama", tmp_path, s3.environment, wanted={"sha256": wrong})


@pytest.mark.parametrize(
    ("head", "checksum"),
    [
        ({"ETag": f'"{DIGEST}"'}, Checksum("md5", DIGEST)),
        ({"ETag": f'"{DIGEST}"', "ServerSideEncryption": "aws:kms"}, None),
        ({"ETag": f'"{DIGEST}"', "SSECustomerAlgorithm": "AES256"}, None),
        ({"ETag": '"opaque"'}, None),
        ({"ETag": f'"{DIGEST}-3"', "ContentLength": 25, "FirstPart": 10}, Checksum("md5-parts", f"{DIGEST}-3", 10)),
        # parts of different sizes
        ({"ETag": f'"{DIGEST}-3"', "ContentLength": 45, "FirstPart": 10}, None),
        ({"ETag": f'"{DIGEST}-3"', "ContentLength": 25, "FirstPart": None}, None),
        ({"ETag": f'"{DIGEST}"', "ChecksumSHA256": "qg=="}, Checksum("sha256", "aa")),
        ({"ETag": f'"{DIGEST}-2"', "ChecksumCRC32": "/w==", "ChecksumType": "FULL_OBJECT"}, Checksum("crc32", "ff")),
        # a checksum of checksums
        ({"ETag": f'"{DIGEST}"', "ChecksumSHA256": "qg==-2", "ChecksumType": "COMPOSITE"}, Checksum("md5", DIGEST)),
    ],
)
def test_the_best_checksum_of_an_object_is_taken(head: dict[str, Any], checksum: Checksum | None) -> None:
    assert s3_checksum(head) == checksum
