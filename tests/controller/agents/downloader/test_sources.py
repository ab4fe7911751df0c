# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest

from controller.agents.downloader.core.errors import (
    AccessRefused,
    ChecksumMismatch,
    ContentRefused,
    SourceChanged,
    SourceNotFound,
    SourceUnavailable,
    UriInvalid,
)
from tests.controller.agents.downloader.downloads import MIB, Told, below, fetched, random_bytes
from tests.controller.agents.downloader.servers import (
    AzureBlobs,
    Files,
    GoogleStorage,
    Hub,
    Registry,
    WebHdfs,
    serving,
)

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web

LARGE = random_bytes(MIB + 12345)
MODEL = {"config.json": b"{}", "model.safetensors": LARGE, "original/weights.pth": b"old", "empty.txt": b""}


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_a_repository_of_a_hub_comes_at_its_commit_with_checksums(tmp_path: Path) -> None:
    hub = Hub(MODEL, token="hf_secret")  # noqa: S106 - of a double
    async with hub.running() as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_secret"}
        wanted = {"ignore": ("original/*",)}
        path = await fetched("hf://org/model", tmp_path, environment, wanted=wanted)
    assert files_of(path) == {name: one for name, one in MODEL.items() if not name.startswith("original")}
    marker = json.loads((path.parent / "ready.json").read_text())
    assert marker["revision"] == Hub.commit
    kept = {one["path"]: one["checksum"] for one in marker["files"]}
    assert kept["model.safetensors"] == f"sha256:{hashlib.sha256(LARGE).hexdigest()}"
    assert kept["config.json"].startswith("git-sha1:")
    assert "hf_secret" not in "".join(one.read_text(errors="replace") for one in path.parent.glob("*.json"))


async def test_a_folder_of_a_repository_is_a_model_of_its_own(tmp_path: Path) -> None:
    async with Hub(MODEL).running() as endpoint:
        path = await fetched(f"hf://org/model@{Hub.commit}/original", tmp_path, {"HF_ENDPOINT": endpoint})
    assert files_of(path) == {"weights.pth": b"old"}


@pytest.mark.parametrize(
    ("uri", "token", "error", "says"),
    [
        ("hf://org/model@nightly", "hf_secret", SourceNotFound, "no revision 'nightly'"),
        ("hf://org/other", "hf_secret", SourceNotFound, "no org/other"),
        ("hf://org/model", "", AccessRefused, "gated"),
    ],
)
async def test_a_hub_that_refuses_is_understood(
    tmp_path: Path, uri: str, token: str, error: type[Exception], says: str
) -> None:
    async with Hub(MODEL, token="hf_secret").running() as endpoint:  # noqa: S106 - of a double
        with pytest.raises(error, match=says):
            await fetched(uri, tmp_path, {"HF_ENDPOINT": endpoint} | ({"HF_TOKEN": token} if token else {}))


async def test_bytes_that_are_not_what_the_hub_says_are_refused_and_removed(tmp_path: Path) -> None:
    hub = Hub(MODEL)
    hub.store.files["/blob/model.safetensors"] = LARGE[:-1] + bytes([LARGE[-1] ^ 1])
    async with hub.running() as endpoint:
        with pytest.raises(ChecksumMismatch, match=r"model\.safetensors should have sha256 .* it was removed"):
            await fetched("hf://org/model", tmp_path, {"HF_ENDPOINT": endpoint})
        assert below(tmp_path, "model.safetensors") == []
        # the source is whole again: nothing of the wrong file is left to be taken for right
        hub.store.files["/blob/model.safetensors"] = LARGE
        assert files_of(await fetched("hf://org/model", tmp_path, {"HF_ENDPOINT": endpoint})) == MODEL


async def test_a_checksum_of_the_users_is_compared_too(tmp_path: Path) -> None:
    async with serving(Files({"/m.bin": LARGE}).answer) as host:
        with pytest.raises(ChecksumMismatch, match="sha256 0000"):
            await fetched(f"http://{host}/m.bin", tmp_path, wanted={"sha256": (("m.bin", "0" * 64),)})
        right = hashlib.sha256(LARGE).hexdigest()
        await fetched(f"http://{host}/m.bin", tmp_path, wanted={"sha256": (("m.bin", right),)})
        with pytest.raises(UriInvalid, match=r"not fetched: 'n\.bin'"):
            await fetched(f"http://{host}/m.bin", tmp_path, wanted={"sha256": (("n.bin", right),)})


async def test_http_headers_go_to_the_urls_host_and_not_where_it_redirects(tmp_path: Path) -> None:
    store = Files({"/real.bin": LARGE})
    async with serving(store.answer) as other:

        async def redirect(request: web.Request) -> web.StreamResponse:
            from aiohttp import web as answers  # noqa: PLC0415

            assert request.headers["X-Key"] == "secret"
            return answers.Response(status=302, headers={"Location": f"http://{other}/real.bin"})

        async with serving(redirect) as host:
            headers = {"ATTACHE_HTTP_HEADERS": '{"X-Key": "secret"}'}
            path = await fetched(f"http://{host}/m.bin", tmp_path, headers)
    assert files_of(path) == {"m.bin": LARGE}
    assert store.seen
    assert all("X-Key" not in one.headers for one in store.seen)


async def test_redirects_have_an_end(tmp_path: Path) -> None:
    async def again(request: web.Request) -> web.StreamResponse:
        from aiohttp import web as answers  # noqa: PLC0415

        return answers.Response(status=302, headers={"Location": request.path + "x"})

    async with serving(again) as host:
        with pytest.raises(SourceUnavailable, match="redirects more than 5 times"):
            await fetched(f"http://{host}/m.bin", tmp_path)


async def test_a_server_without_ranges_and_one_without_lengths_are_read_from_the_beginning(tmp_path: Path) -> None:
    async def chunked(request: web.Request) -> web.StreamResponse:
        from aiohttp import web as answers  # noqa: PLC0415

        answer = answers.StreamResponse()
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        await answer.write(LARGE)
        return answer

    async with serving(Files({"/m.bin": LARGE}, has_ranges=False).answer) as host:
        assert files_of(await fetched(f"http://{host}/m.bin", tmp_path / "a")) == {"m.bin": LARGE}
    async with serving(chunked) as host:
        assert files_of(await fetched(f"http://{host}/m.bin", tmp_path / "b")) == {"m.bin": LARGE}


async def test_a_file_that_is_replaced_meanwhile_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE})

    async def replace(request: web.Request) -> web.StreamResponse:
        answer = await store.answer(request)
        store.files["/m.bin"] = LARGE[::-1]
        return answer

    async with serving(store.answer) as host:
        store.faults = [replace]  # its first answer, which says the size
        with pytest.raises(SourceChanged, match="replaced during the download"):
            await fetched(f"http://{host}/m.bin", tmp_path)
        assert files_of(await fetched(f"http://{host}/m.bin", tmp_path)) == {"m.bin": LARGE[::-1]}


async def test_an_artefact_of_a_registry_comes_by_digest_with_a_token(tmp_path: Path) -> None:
    registry = Registry("user", "password")
    raw = "application/vnd.cncf.model.weight.v1.raw"
    digest = registry.push("v1", [(raw, "config.json", b"{}"), (raw, "sub/model.safetensors", LARGE)])
    config = tmp_path / "docker"
    config.mkdir()
    async with registry.running() as host:
        auth = base64.b64encode(b"user:password").decode()
        (config / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        path = await fetched(f"oci://{host}/org/model:v1", tmp_path / "c", {"DOCKER_CONFIG": str(config)})
        assert files_of(path) == {"config.json": b"{}", "sub/model.safetensors": LARGE}
        assert json.loads((path.parent / "ready.json").read_text())["revision"] == digest
        pinned = await fetched(f"oci://{host}/org/model@{digest}", tmp_path / "c", {"DOCKER_CONFIG": str(config)})
        assert pinned == path
        with pytest.raises(AccessRefused):
            await fetched(f"oci://{host}/org/model:v1", tmp_path / "d")


async def test_a_manifest_that_is_not_its_digest_and_a_layer_that_is_not_its_own_are_refused(tmp_path: Path) -> None:
    registry = Registry()
    digest = registry.push("v1", [("application/octet-stream", "m.bin", LARGE)])
    async with registry.running() as host:
        registry.blobs.files[f"/sha256:{hashlib.sha256(LARGE).hexdigest()}"] = LARGE[::-1]
        with pytest.raises(ChecksumMismatch, match=r"m\.bin should have sha256"):
            await fetched(f"oci://{host}/org/model:v1", tmp_path)
        kind, text = registry.manifests[digest]
        registry.manifests[digest] = (kind, text + b" ")
        with pytest.raises(ChecksumMismatch, match="gives a manifest of"):
            await fetched(f"oci://{host}/org/model@{digest}", tmp_path)


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


async def test_layers_of_an_image_lie_one_over_the_other_and_only_models_is_kept(tmp_path: Path) -> None:
    registry = Registry()
    layer = "application/vnd.oci.image.layer.v1.tar"
    base = tar_of({"etc/passwd": b"root", "models/config.json": b"old", "models/gone.bin": b"x"})
    top = tar_of({"models/config.json": b"new", "models/.wh.gone.bin": b"", "models/sub/m.bin": LARGE}, "w:gz")
    layers = [(layer, "", base), (f"{layer}+gzip", "", top)]
    digest = registry.push("amd", layers, config="application/vnd.oci.image.config.v1+json")
    size = len(registry.manifests[digest][1])
    described = [
        {
            "mediaType": Registry.manifest_type,
            "digest": digest,
            "size": size,
            "platform": {"os": "linux", "architecture": one},
        }
        for one in ("amd64", "arm64")
    ]
    index = "application/vnd.oci.image.index.v1+json"
    registry.add_manifest("v1", index, {"schemaVersion": 2, "mediaType": index, "manifests": described})
    async with registry.running() as host:
        path = await fetched(f"oci://{host}/org/model:v1", tmp_path)
    assert files_of(path) == {"config.json": b"new", "sub/m.bin": LARGE}


async def test_webhdfs_is_read_from_offsets_at_the_data_node(tmp_path: Path) -> None:
    hdfs = WebHdfs({"/m/config.json": b"{}", "/m/sub/model.bin": LARGE, "/m2/x": b"other"}, user="hadoop")
    async with hdfs.running() as host:
        path = await fetched(f"hdfs://{host}/m", tmp_path, {"HADOOP_USER_NAME": "hadoop"})
        assert files_of(path) == {"config.json": b"{}", "sub/model.bin": LARGE}
        assert len([one for one in hdfs.opened if one[1] > 0]) >= 4
        single = await fetched(f"hdfs://{host}/m/sub/model.bin", tmp_path, {"HADOOP_USER_NAME": "hadoop"})
        assert files_of(single) == {"model.bin": LARGE}
        with pytest.raises(AccessRefused):
            await fetched(f"hdfs://{host}/m", tmp_path)
        with pytest.raises(SourceNotFound):
            await fetched(f"hdfs://{host}/none", tmp_path, {"HADOOP_USER_NAME": "hadoop"})


async def test_google_cloud_storage_pins_generations_and_checks_both_checksums(tmp_path: Path) -> None:
    google_crc32c = pytest.importorskip("google_crc32c")
    crc = base64.b64encode(google_crc32c.Checksum(LARGE).digest()).decode()
    md5 = base64.b64encode(hashlib.md5(b"{}").digest()).decode()  # noqa: S324 - as Google has it
    checks = {"llama/model.bin": {"crc32c": crc}, "llama/config.json": {"md5Hash": md5}}
    objects = {"llama/model.bin": LARGE, "llama/config.json": b"{}", "llama/": b"", "llama-2/x": b"other"}
    storage = GoogleStorage(objects, checks)
    async with serving(storage.answer) as host:
        path = await fetched("gs://bucket/llama", tmp_path, {"STORAGE_EMULATOR_HOST": host})
        assert files_of(path) == {"model.bin": LARGE, "config.json": b"{}"}
        assert storage.lists == 2
        storage.objects["llama/model.bin"] = LARGE[::-1]
        with pytest.raises(ChecksumMismatch, match="crc32c"):
            await fetched("gs://bucket/llama", tmp_path / "other", {"STORAGE_EMULATOR_HOST": host})


@pytest.mark.parametrize(
    "credential", [{"AZURE_STORAGE_KEY": base64.b64encode(b"key").decode()}, {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=s"}]
)
async def test_azure_blobs_come_with_a_key_and_with_a_signature(tmp_path: Path, credential: dict[str, str]) -> None:
    pytest.importorskip("azure.storage.blob")
    blobs = AzureBlobs({"llama/model.bin": LARGE, "llama/sub/config.json": b"{}", "llama-2/x": b"other"})
    async with serving(blobs.answer) as host:
        environment = {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_ENDPOINT": f"http://{host}", **credential}
        path = await fetched("az://container/llama", tmp_path, environment)
        assert files_of(path) == {"model.bin": LARGE, "sub/config.json": b"{}"}
        blobs.blobs["llama/model.bin"] = LARGE[::-1]
        # its list says one ETag, its blob has another
        blobs._listed = lambda _: AzureBlobs({"llama/model.bin": LARGE})._listed("")  # type: ignore[method-assign]
        with pytest.raises((ChecksumMismatch, SourceChanged)):
            await fetched("az://container/llama", tmp_path / "other", environment)


async def test_weights_that_are_mounted_are_linked_and_not_copied(tmp_path: Path) -> None:
    claim = tmp_path / "pvc" / "weights"
    (claim / "llama").mkdir(parents=True)
    (claim / "llama" / "config.json").write_text("{}")
    (claim / "out").symlink_to("/etc")
    link = tmp_path / "models"
    path = await fetched("pvc://weights/llama", tmp_path / "c", link=link, claims=tmp_path / "pvc")
    assert (path, link.resolve()) == (claim / "llama", claim / "llama")
    assert not (tmp_path / "c").exists()
    await fetched(f"file://{claim}/llama", tmp_path / "c", link=link)
    with pytest.raises(ContentRefused, match="leads out of"):
        await fetched("pvc://weights/out", tmp_path / "c", claims=tmp_path / "pvc")
    with pytest.raises(ContentRefused, match="leads out of"):
        await fetched("file:///etc/passwd", tmp_path / "c", files=tmp_path)
    with pytest.raises(SourceNotFound, match="is the volume mounted"):
        await fetched("pvc://weights/none", tmp_path / "c", claims=tmp_path / "pvc")
    with pytest.raises(UriInvalid, match="need a copy"):
        await fetched("pvc://weights/llama", tmp_path / "c", claims=tmp_path / "pvc", wanted={"allow": ("*.json",)})


async def test_patterns_choose_and_what_they_leave_may_not_be_nothing(tmp_path: Path) -> None:
    told = Told()
    async with Hub(MODEL).running() as endpoint:
        environment = {"HF_ENDPOINT": endpoint}
        wanted = {"allow": ("*.json", "*.pth"), "ignore": ("original/",)}
        path = await fetched("hf://org/model", tmp_path, environment, wanted=wanted, told=told)
        assert files_of(path) == {"config.json": b"{}"}
        with pytest.raises(SourceNotFound, match="that the patterns leave"):
            await fetched("hf://org/model", tmp_path, environment, wanted={"allow": ("*.gguf",)})
    assert told.phases == ["Resolving", "Downloading", "Ready"]
    assert (told.all[-1].bytes_done, told.all[-1].files_done) == (2, 1)
