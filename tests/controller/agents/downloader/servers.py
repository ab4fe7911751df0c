# SPDX-License-Identifier: Apache-2.0
"""Servers of weights on loopback that check what clients send, and a proxy that counts bytes and can hold them back."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping


@contextlib.asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """``host:port`` of a server on which ``handler`` answers everything."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert site._server is not None
        yield f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


class Proxy:
    """Passes TCP on. ``sent``: bytes to clients. Once that is ``hold_after``, nothing more goes until ``release``."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.sent = 0
        self.connections = 0
        self.hold_after: int | None = None
        self.is_holding = asyncio.Event()
        self._go_on = asyncio.Event()

    def release(self) -> None:
        """Hold nothing back any more."""
        self.hold_after = None
        self._go_on.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """``host:port`` to connect to."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError), contextlib.closing(writer):
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(up_writer):
                pumps = [
                    asyncio.create_task(self._pump(reader, up_writer, counts=False)),
                    asyncio.create_task(self._pump(up_reader, writer, counts=True)),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while block := await reader.read(65536):
                if counts:
                    self.sent += len(block)
                    if self.hold_after is not None and self.sent >= self.hold_after:
                        self.is_holding.set()
                        await self._go_on.wait()
                writer.write(block)
                await writer.drain()


class Files:
    """A web server of files with ranges and ETags. ``seen``: requests; ``faults``: answers instead, one a request."""

    def __init__(self, files: Mapping[str, bytes], *, has_ranges: bool = True) -> None:
        self.files = dict(files)
        self.has_ranges = has_ranges
        self.seen: list[web.BaseRequest] = []
        self.faults: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A file, or a part of it."""
        self.seen.append(request)
        if self.faults:
            return await self.faults.pop(0)(request)
        content = self.files.get(request.path)
        if content is None:
            return web.Response(status=404)
        return ranged(request, content, has_ranges=self.has_ranges)


def ranged(request: web.Request, content: bytes, *, has_ranges: bool = True) -> web.Response:
    """The range that a request asks for."""
    headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"'}  # noqa: S324
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
    if asked is None or not has_ranges:
        return web.Response(body=content, headers=headers)
    start, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
    if start >= len(content):
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
    return web.Response(status=206, body=content[start:end], headers=headers)


def unexpected(request: web.Request, why: str) -> web.Response:
    """A mistake of the client's, so that its test fails and says why."""
    return web.Response(status=400, text=f"{request.method} {request.path_qs}: {why}")


class Hub:
    """The two calls of a Hugging Face hub that matter: what a revision has, and where a file is.

    Large files are redirected to another host, which must never see the token.
    """

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: Mapping[str, bytes], token: str = "") -> None:
        self.files = dict(files)
        self.token = token
        self.store = Files({f"/blob/{name}": content for name, content in files.items()})
        self.store_host = ""
        self.calls: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The hub's endpoint."""
        async with serving(self._store) as self.store_host, serving(self._answer) as host:
            yield f"http://{host}"

    async def _store(self, request: web.Request) -> web.StreamResponse:
        if "authorization" in request.headers:
            return unexpected(request, "the token was sent to another host")
        if request.query.get("X-Amz-Signature") != "signed":
            return unexpected(request, "the redirect's query was changed")
        return await self.store.answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one an answer
        self.calls.append(request.path)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.Response(status=401, headers={"X-Error-Code": "GatedRepo"})
        if found := re.fullmatch(r"/api/models/org/model/revision/([^/]+)", request.path):
            if found[1] not in ("main", self.commit):
                return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
            if request.query.get("blobs") not in ("true", "True"):
                return unexpected(request, "sizes and checksums come with blobs=true only")
            siblings = [self._sibling(name, content) for name, content in self.files.items()]
            return web.json_response({"id": "org/model", "sha": self.commit, "siblings": siblings})
        if found := re.fullmatch(rf"/org/model/resolve/{self.commit}/(.+)", request.path):
            if found[1] not in self.files:
                return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
            if not self._is_large(self.files[found[1]]):
                return ranged(request, self.files[found[1]])
            where = f"http://{self.store_host}/blob/{found[1]}?X-Amz-Signature=signed"
            return web.Response(status=302, headers={"Location": where})
        return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})

    @staticmethod
    def _is_large(content: bytes) -> bool:
        return len(content) > 1000

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
        one: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git}
        if self._is_large(content):
            digest = hashlib.sha256(content).hexdigest()
            one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
        return one


class Registry:
    """A container registry that gives tokens to who knows the password, and blobs by redirect."""

    manifest_type = "application/vnd.oci.image.manifest.v1+json"

    def __init__(self, user: str = "", password: str = "") -> None:
        self.blobs = Files({})
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self._basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self.host = ""
        self.store_host = ""

    def add_blob(self, content: bytes) -> tuple[str, int]:
        """Keep a blob; its digest and size."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs.files[f"/{digest}"] = content
        return digest, len(content)

    def push(
        self, tag: str, layers: list[tuple[str, str, bytes]], config: str = "application/vnd.oci.empty.v1+json"
    ) -> str:
        """A manifest of layers (media type, title, content) under a tag; its digest."""
        described = []
        for kind, title, content in layers:
            digest, size = self.add_blob(content)
            annotations = {"org.opencontainers.image.title": title} if title else {}
            described.append({"mediaType": kind, "digest": digest, "size": size, "annotations": annotations})
        digest, size = self.add_blob(b"{}")
        manifest = {
            "schemaVersion": 2,
            "mediaType": self.manifest_type,
            "config": {"mediaType": config, "digest": digest, "size": size},
            "layers": described,
        }
        return self.add_manifest(tag, self.manifest_type, manifest)

    def add_manifest(self, tag: str, kind: str, manifest: dict[str, Any]) -> str:
        """Any manifest or index."""
        text = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
        self.manifests[tag] = self.manifests[digest] = (kind, text)
        return digest

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The registry's ``host:port``."""
        async with serving(self._store) as self.store_host, serving(self._answer) as self.host:
            yield self.host

    async def _store(self, request: web.Request) -> web.StreamResponse:
        if "authorization" in request.headers:
            return unexpected(request, "the registry's token was sent to another host")
        return await self.blobs.answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one an answer
        if request.path == "/token":
            if request.headers.get("authorization") != f"Basic {self._basic}":
                return web.Response(status=401)
            if dict(request.query) != {"service": "weights", "scope": "repository:org/model:pull"}:
                return unexpected(request, "another scope than the challenge said")
            return web.json_response({"token": "let-me-in", "expires_in": 300})
        if self._basic and request.headers.get("authorization") != "Bearer let-me-in":
            said = f'Bearer realm="http://{self.host}/token",service="weights",scope="repository:org/model:pull"'
            return web.Response(status=401, headers={"WWW-Authenticate": said})
        if found := re.fullmatch(r"/v2/org/model/manifests/(.+)", request.path):
            if self.manifest_type not in request.headers.get("accept", ""):
                return unexpected(
                    request, "a registry answers with an old kind of manifest to whoever accepts no new one"
                )
            if found[1] not in self.manifests:
                return web.Response(status=404)
            kind, text = self.manifests[found[1]]
            return web.Response(body=text, content_type=kind)
        if found := re.fullmatch(r"/v2/org/model/blobs/(sha256:[0-9a-f]{64})", request.path):
            return web.Response(status=307, headers={"Location": f"http://{self.store_host}/{found[1]}"})
        return web.Response(status=404)


class WebHdfs:
    """A name node that lists and redirects, and a data node that sends from an offset."""

    def __init__(self, files: Mapping[str, bytes], user: str) -> None:
        self.files = dict(files)
        self._user = user
        self.data_host = ""
        self.opened: list[tuple[str, int, int]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The name node's ``host:port``."""
        async with serving(self._data_node) as self.data_host, serving(self._name_node) as host:
            yield host

    async def _name_node(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/webhdfs/v1")
        if request.query.get("user.name") != self._user:
            return web.json_response({"RemoteException": {"exception": "AccessControlException"}}, status=403)
        match request.query.get("op"):
            case "LISTSTATUS":
                return self._listed(path)
            case "OPEN" if path in self.files:
                return web.Response(status=307, headers={"Location": f"http://{self.data_host}{request.path_qs}"})
            case _:
                return web.json_response({"RemoteException": {"exception": "FileNotFoundException"}}, status=404)

    def _listed(self, path: str) -> web.Response:
        if path in self.files:
            found = {"": len(self.files[path])}
        else:
            below = {
                name.removeprefix(f"{path}/"): len(one)
                for name, one in self.files.items()
                if name.startswith(f"{path}/")
            }
            if not below:
                return web.json_response({"RemoteException": {"exception": "FileNotFoundException"}}, status=404)
            found = {name.partition("/")[0]: -1 if "/" in name else size for name, size in below.items()}
        statuses = [
            {
                "pathSuffix": name,
                "type": "DIRECTORY" if size < 0 else "FILE",
                "length": max(size, 0),
                "modificationTime": 1320173277227,
            }
            for name, size in found.items()
        ]
        return web.json_response({"FileStatuses": {"FileStatus": statuses}})

    async def _data_node(self, request: web.Request) -> web.StreamResponse:
        if "range" in request.headers:
            return unexpected(request, "WebHDFS has no Range header")
        content = self.files[request.path.removeprefix("/webhdfs/v1")]
        offset, length = int(request.query.get("offset", 0)), int(request.query.get("length", len(content)))
        self.opened.append((request.path, offset, length))
        return web.Response(body=content[offset : offset + length])


class GoogleStorage:
    """The JSON API: lists page by page, objects by their generation."""

    def __init__(self, objects: Mapping[str, bytes], checksums: Mapping[str, dict[str, str]]) -> None:
        self.objects = dict(objects)
        self._checksums = checksums
        self.lists = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A list or an object."""
        if request.path == "/storage/v1/b/bucket/o":
            self.lists += 1
            names = sorted(name for name in self.objects if name.startswith(request.query.get("prefix", "")))
            start = int(request.query.get("pageToken", 0))
            items = [
                {"name": name, "size": str(len(self.objects[name])), "generation": "7", **self._checksums.get(name, {})}
                for name in names[start : start + 2]
            ]
            more = {"nextPageToken": str(start + 2)} if start + 2 < len(names) else {}
            return web.json_response({"items": items, **more})
        name = request.path.removeprefix("/storage/v1/b/bucket/o/")
        if request.query.get("alt") != "media" or request.query.get("generation") != "7":
            return unexpected(request, "an object without its generation may be another one by now")
        return ranged(request, self.objects[name])


class AzureBlobs:
    """Lists and blobs of a container, to whoever shows a signature."""

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self.blobs = dict(blobs)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A list or a blob."""
        if request.query.get("comp") == "list":
            if (
                not request.headers.get("authorization", "").startswith("SharedKey account:")
                and "sig" not in request.query
            ):
                return web.Response(status=403)
            return web.Response(text=self._listed(request.query.get("prefix", "")), content_type="application/xml")
        if not request.query.get("sig"):
            return web.Response(status=403)
        name = request.path.removeprefix("/container/")
        return ranged(request, self.blobs[name]) if name in self.blobs else web.Response(status=404)

    def _listed(self, prefix: str) -> str:
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties><Content-Length>{len(content)}</Content-Length>"
            f"<Etag>{hashlib.md5(content).hexdigest()}</Etag>"  # noqa: S324
            f"<Content-MD5>{base64.b64encode(hashlib.md5(content).digest()).decode()}</Content-MD5>"  # noqa: S324
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, content in self.blobs.items()
            if name.startswith(prefix)
        )
        head = '<?xml version="1.0" encoding="utf-8"?>'
        return (
            f"{head}<EnumerationResults"
            f' ContainerName="container"><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>'
        )
