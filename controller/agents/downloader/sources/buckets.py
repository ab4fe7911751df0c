# SPDX-License-Identifier: Apache-2.0
"""s3://, gs:// and az://: object stores. Their libraries find credentials and sign; bytes come through our own fetcher.

``docs/decisions/0023-own-transfers.md`` compares that with obstore, which hides the checksums of objects.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec

from controller.agents.downloader.core.errors import AccessRefused, SourceNotFound, SourceUnavailable, UriInvalid
from controller.agents.downloader.core.fetch_plan import Checksum, FileListing, RemoteFile, listing_digest
from controller.agents.downloader.environment import import_optional
from controller.agents.downloader.transfer import HttpRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.agents.downloader.core.uri import AzureLocation, BucketLocation
    from controller.agents.downloader.environment import EnvironmentReader
    from controller.agents.downloader.transfer import TransferClient

_S3_SIGNED_FOR_S: Final = 3600
_HEADS_AT_ONCE: Final = 8
_FULL_OBJECT: Final = "FULL_OBJECT"
_GOOGLE_SERVER: Final = "https://storage.googleapis.com"
_GOOGLE_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
_GOOGLE_FIELDS: Final = "nextPageToken,items(name,size,generation,md5Hash,crc32c,contentEncoding)"
_GOOGLE_TOKEN_S: Final = 300.0
_AZURE_SIGNED_FOR: Final = timedelta(hours=1)
_AZURE_SCOPE: Final = "https://storage.azure.com/.default"
_AZURE_VERSION: Final = "2021-12-02"


def relative_object_path(prefix: str, key: str) -> str:
    """The path of the object ``key``; empty: it is none of the model's files.

    ``models/llama`` means the object of that name, or what is in that folder, and never ``models/llama-2/...``. Names
    that end in ``/`` only mark folders.
    """
    if key.endswith("/"):
        return ""
    if key == prefix:
        return key.rpartition("/")[2]
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    return key.removeprefix(folder) if key.startswith(folder) else ""


class S3Source:
    """boto3 finds credentials, region and endpoint as everywhere (environment, files, web identity) and signs URLs.

    Further settings: ``AWS_NO_SIGN_REQUEST`` for public buckets, ``AWS_S3_ADDRESSING_STYLE`` (path, virtual, auto).
    """

    def __init__(self, place: BucketLocation, environment: EnvironmentReader) -> None:
        self._place = place
        boto3 = import_optional("boto3", "s3")
        botocore = import_optional("botocore", "s3")
        endpoint = environment.get("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        style = environment.get("AWS_S3_ADDRESSING_STYLE") or ("path" if endpoint else "auto")
        settings: dict[str, Any] = {
            "s3": {"addressing_style": style},
            "signature_version": botocore.UNSIGNED if environment.is_on("AWS_NO_SIGN_REQUEST") else "s3v4",
            "retries": {"total_max_attempts": 1},  # the caller retries
            "connect_timeout": 10,
            "read_timeout": 30,
            "max_pool_connections": _HEADS_AT_ONCE,
        }
        keys = {
            "aws_access_key_id": environment.get("AWS_ACCESS_KEY_ID") or None,
            "aws_secret_access_key": environment.get("AWS_SECRET_ACCESS_KEY") or None,
            "aws_session_token": environment.get("AWS_SESSION_TOKEN") or None,
        }
        region = environment.get("AWS_REGION", "AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else None)
        self._errors = import_optional("botocore.exceptions", "s3")
        try:
            self._client = boto3.session.Session(**keys, region_name=region).client(
                "s3", endpoint_url=endpoint or None, config=import_optional("botocore.config", "s3").Config(**settings)
            )
        except (self._errors.BotoCoreError, ValueError) as error:
            raise UriInvalid(f"the settings for S3 cannot be used: {error}") from error

    async def list_files(self, revision: str) -> FileListing:
        """All objects below the prefix, with their versions; a digest of these is the revision."""
        if revision:
            raise UriInvalid("s3:// has no revisions; versions of objects are pinned when they are listed")
        keys = await asyncio.to_thread(self._called, self._keys)
        turn = asyncio.Semaphore(_HEADS_AT_ONCE)

        async def described(key: str) -> tuple[str, Mapping[str, Any]]:
            async with turn:
                return key, await asyncio.to_thread(self._called, self._head, key)

        found = await asyncio.gather(*(described(key) for key in keys))
        files = tuple(self._file(key, head) for key, head in found)
        pinned = listing_digest(sorted((one.path, one.size, one.version, one.locator) for one in files))
        return FileListing(pinned, files)

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """A URL that is signed for an hour."""
        key, _, version = file.locator.partition("\n")
        parameters = {"Bucket": self._place.bucket, "Key": key} | ({"VersionId": version} if version else {})
        url = await asyncio.to_thread(self._called, self._signed, parameters)
        return HttpRequest(url)

    def _signed(self, parameters: Mapping[str, str]) -> str:
        return str(
            self._client.generate_presigned_url("get_object", Params=dict(parameters), ExpiresIn=_S3_SIGNED_FOR_S)
        )

    def _keys(self) -> list[str]:
        place = self._place
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
        found = [str(one["Key"]) for page in pages for one in page.get("Contents", ())]
        return [key for key in found if relative_object_path(place.prefix, key)]

    def _head(self, key: str) -> Mapping[str, Any]:
        bucket = self._place.bucket
        head = dict(self._client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED"))
        if "-" in head.get("ETag", "") and head.get("ContentLength"):
            try:
                first = self._client.head_object(Bucket=bucket, Key=key, PartNumber=1)
                head["FirstPart"] = first.get("ContentLength")
            except self._errors.ClientError:
                head["FirstPart"] = None  # not every server supports parts; the size is checked in any case
        return head

    def _file(self, key: str, head: Mapping[str, Any]) -> RemoteFile:
        version = str(head.get("VersionId", ""))
        return RemoteFile(
            relative_object_path(self._place.prefix, key),
            int(head["ContentLength"]),
            key if version in ("", "null") else f"{key}\n{version}",
            s3_checksum(head),
            version=str(head.get("ETag", "")).strip('"'),
        )

    def _called(self, function: Any, *arguments: object) -> Any:  # noqa: ANN401 - what the function has
        """Errors of the library as ours, without what they may repeat of a request."""
        where = f"s3://{self._place.bucket}/{self._place.prefix}"
        errors = self._errors
        try:
            return function(*arguments)
        except errors.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if status in (401, 403) or code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
                raise AccessRefused(f"{where}: {code or status}; are the credentials right, and enough?") from error
            if status == 404:
                raise SourceNotFound(f"{where}: {code or 'there is no such bucket or object'}") from error
            raise SourceUnavailable(
                f"{where}: {code or status}", is_temporary=status >= 500 or status == 429
            ) from error
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.CredentialRetrievalError) as error:
            raise AccessRefused(
                f"{where}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a service account"
                " with a role, or AWS_NO_SIGN_REQUEST=true for a public bucket"
            ) from error
        except errors.NoRegionError as error:
            raise UriInvalid(f"{where}: set AWS_REGION") from error
        except errors.BotoCoreError as error:
            raise SourceUnavailable(f"{where}: {type(error).__name__}") from error


def s3_checksum(head: Mapping[str, Any]) -> Checksum | None:
    """The best checksum of the whole object that its head has: a full one, else the ETag where that is an MD5."""
    if head.get("ChecksumType", _FULL_OBJECT) == _FULL_OBJECT:
        for name, algorithm in (("ChecksumSHA256", "sha256"), ("ChecksumCRC32", "crc32")):
            given = str(head.get(name, ""))
            if given and "-" not in given:
                try:
                    return Checksum(algorithm, base64.b64decode(given, validate=True).hex())  # type: ignore[arg-type]
                except binascii.Error:
                    continue
    if head.get("ServerSideEncryption", "") not in ("", "AES256") or head.get("SSECustomerAlgorithm"):
        return None  # the ETag is then no MD5
    etag = str(head.get("ETag", "")).strip('"')
    digest, dash, count = etag.partition("-")
    if len(digest) != 32 or not all(one in "0123456789abcdef" for one in digest):
        return None
    if not dash:
        return Checksum("md5", digest)
    first, size = head.get("FirstPart"), int(head.get("ContentLength", 0))
    # all parts but the last have one size, or the digest cannot be made again
    if first and count.isdecimal() and -(-size // int(first)) == int(count):
        return Checksum("md5-parts", etag, int(first))
    return None


class _GoogleItem(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    size: str
    generation: str
    md5_hash: str = ""
    crc32c: str = ""
    content_encoding: str = ""


class _GooglePage(msgspec.Struct, frozen=True, rename="camel"):
    items: list[_GoogleItem] = []
    next_page_token: str = ""


class GoogleSource:
    """Objects pinned to their generations.

    google-auth finds credentials as everywhere: ``GOOGLE_APPLICATION_CREDENTIALS`` names a mounted key, else workload
    identity. ``GOOGLE_ANONYMOUS=true``: none, for public buckets. ``STORAGE_EMULATOR_HOST``: another server, without
    any.
    """

    def __init__(self, place: BucketLocation, transfer: TransferClient, environment: EnvironmentReader) -> None:
        self._place = place
        self._transfer = transfer
        emulator = environment.get("STORAGE_EMULATOR_HOST").rstrip("/")
        self._server = (emulator if "://" in emulator else f"http://{emulator}") if emulator else _GOOGLE_SERVER
        self._is_anonymous = bool(emulator) or environment.is_on("GOOGLE_ANONYMOUS")
        self._token = environment.get("GOOGLE_OAUTH_ACCESS_TOKEN")
        self._credentials: Any = None
        self._refreshed_at_s = 0.0
        self._packed: set[str] = set()
        import_optional("google_crc32c", "gs")  # before the first byte, not after the last

    async def list_files(self, revision: str) -> FileListing:
        """All objects below the prefix; a digest of their generations is the revision."""
        if revision:
            raise UriInvalid("gs:// has no revisions; generations of objects are pinned when they are listed")
        found: list[_GoogleItem] = []
        token = ""
        while True:
            query = {"prefix": self._place.prefix, "fields": _GOOGLE_FIELDS} | ({"pageToken": token} if token else {})
            url = f"{self._server}/storage/v1/b/{quote(self._place.bucket, safe='')}/o?{urlencode(query)}"
            answer = await self._transfer.fetch_small(HttpRequest(url, await self._headers()))
            try:
                page = msgspec.json.decode(answer.body, type=_GooglePage)
            except msgspec.DecodeError as error:
                raise SourceUnavailable(f"{self._server} answers with no list", is_temporary=False) from error
            found += page.items
            token = page.next_page_token
            if not token:
                break
        files = [self._file(one) for one in found if relative_object_path(self._place.prefix, one.name)]
        return FileListing(listing_digest(sorted((one.path, one.locator) for one in files)), tuple(files))

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """The object's generation, as it is stored: the server would unpack gzip, and then has no ranges."""
        packed = {"Accept-Encoding": "gzip"} if file.locator in self._packed else {}
        return HttpRequest(file.locator, await self._headers() | packed)

    def _file(self, item: _GoogleItem) -> RemoteFile:
        path = f"/storage/v1/b/{quote(self._place.bucket, safe='')}/o/{quote(item.name, safe='')}"
        url = f"{self._server}{path}?{urlencode({'alt': 'media', 'generation': item.generation})}"
        if item.content_encoding == "gzip":
            self._packed.add(url)
        checksum = None
        if item.md5_hash:
            checksum = Checksum("md5", base64.b64decode(item.md5_hash).hex())
        elif item.crc32c:  # composed objects have no MD5
            checksum = Checksum("crc32c", base64.b64decode(item.crc32c).hex())
        return RemoteFile(relative_object_path(self._place.prefix, item.name), int(item.size), url, checksum)

    async def _headers(self) -> dict[str, str]:
        if self._is_anonymous:
            return {}
        token = self._token or await asyncio.to_thread(self._renewed)
        return {"Authorization": f"Bearer {token}"}

    def _renewed(self) -> str:
        auth = import_optional("google.auth", "gs")
        errors = import_optional("google.auth.exceptions", "gs")
        try:
            if self._credentials is None:
                self._credentials, _ = auth.default(scopes=[_GOOGLE_SCOPE])
            if not self._credentials.valid or _now_s() - self._refreshed_at_s > _GOOGLE_TOKEN_S:
                self._credentials.refresh(import_optional("google.auth.transport.requests", "gs").HttpRequest())
                self._refreshed_at_s = _now_s()
        except errors.DefaultCredentialsError as error:
            raise AccessRefused(
                "there are no Google credentials; mount a key and set GOOGLE_APPLICATION_CREDENTIALS"
            ) from error
        except errors.RefreshError as error:
            raise AccessRefused("Google refuses the credentials") from error
        except errors.GoogleAuthError as error:
            raise SourceUnavailable(f"Google gives no token: {type(error).__name__}") from error
        return str(self._credentials.token)


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 - the edge: how old a token is


class AzureSource:
    """The library lists blobs and signs URLs; bytes come through our own fetcher.

    ``AZURE_STORAGE_ACCOUNT`` names the account, or ``AZURE_STORAGE_ENDPOINT`` its URL. One of ``AZURE_STORAGE_KEY``,
    ``AZURE_STORAGE_SAS_TOKEN`` and ``AZURE_STORAGE_ANONYMOUS=true``; else an identity, as azure-identity finds it.
    """

    def __init__(self, place: AzureLocation, environment: EnvironmentReader) -> None:
        self._place = place
        account = environment.get("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
        endpoint = environment.get("AZURE_STORAGE_ENDPOINT")
        if place.account_host:
            account, endpoint = place.account_host.partition(".")[0], f"https://{place.account_host}"
        if not (account or endpoint):
            raise UriInvalid("set AZURE_STORAGE_ACCOUNT, or write az://ACCOUNT.blob.core.windows.net/CONTAINER/PATH")
        self._account = account
        self._endpoint = (endpoint or f"https://{account}.blob.core.windows.net").rstrip("/")
        self._key = environment.get("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY")
        self._signature = environment.get("AZURE_STORAGE_SAS_TOKEN").removeprefix("?")
        self._blobs = import_optional("azure.storage.blob", "az")
        self._identity: Any = None
        if not (self._key or self._signature or environment.is_on("AZURE_STORAGE_ANONYMOUS")):
            self._identity = import_optional("azure.identity", "az").DefaultAzureCredential()
        if self._key and not account:
            raise UriInvalid("AZURE_STORAGE_KEY needs AZURE_STORAGE_ACCOUNT")

    async def list_files(self, revision: str) -> FileListing:
        """All blobs below the prefix; a digest of their ETags is the revision."""
        if revision:
            raise UriInvalid("az:// has no revisions; ETags of blobs are pinned when they are listed")
        files = tuple(await asyncio.to_thread(self._called, self._list))
        return FileListing(listing_digest(sorted((one.path, one.size, one.version) for one in files)), files)

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """A URL that is signed for an hour, or a header with an identity's token."""
        url = f"{self._endpoint}/{quote(self._place.container)}/{quote(file.locator)}"
        if self._key:
            return HttpRequest(f"{url}?{await asyncio.to_thread(self._called, self._signed)}")
        if self._signature:
            return HttpRequest(f"{url}?{self._signature}")
        if self._identity is None:
            return HttpRequest(url, {"x-ms-version": _AZURE_VERSION})
        token = await asyncio.to_thread(self._called, lambda: self._identity.get_token(_AZURE_SCOPE).token)
        return HttpRequest(url, {"Authorization": f"Bearer {token}", "x-ms-version": _AZURE_VERSION})

    def _signed(self) -> str:
        return str(
            self._blobs.generate_container_sas(
                self._account,
                self._place.container,
                account_key=self._key,
                permission=self._blobs.ContainerSasPermissions(read=True),
                expiry=datetime.now(UTC) + _AZURE_SIGNED_FOR,
            )
        )

    def _list(self) -> list[RemoteFile]:
        credential: Any = self._key or self._signature or self._identity
        if self._key:
            credential = {"account_name": self._account, "account_key": self._key}
        with self._blobs.BlobServiceClient(self._endpoint, credential=credential, retry_total=0) as service:
            container = service.get_container_client(self._place.container)
            found = container.list_blobs(name_starts_with=self._place.prefix or None)
            return [self._file(one) for one in found if relative_object_path(self._place.prefix, one.name)]

    def _file(self, blob: Any) -> RemoteFile:  # noqa: ANN401 - the library's BlobProperties
        md5 = blob.content_settings.content_md5
        checksum = Checksum("md5", bytes(md5).hex()) if md5 else None
        path = relative_object_path(self._place.prefix, blob.name)
        return RemoteFile(path, int(blob.size), blob.name, checksum, version=str(blob.etag or "").strip('"'))

    def _called(self, function: Any) -> Any:  # noqa: ANN401 - what the function has
        """Errors of the libraries as ours."""
        where = f"{self._endpoint}/{self._place.container}"
        errors = import_optional("azure.core.exceptions", "az")
        try:
            return function()
        except errors.ClientAuthenticationError as error:
            raise AccessRefused(f"{where}: the credentials are missing, wrong, or not enough") from error
        except errors.ResourceNotFoundError as error:
            raise SourceNotFound(f"{where}: there is no such container") from error
        except errors.HttpResponseError as error:
            status = error.status_code or 0
            if status in (401, 403):
                raise AccessRefused(f"{where}: {error.error_code or status}") from error
            raise SourceUnavailable(f"{where} answers {status}", is_temporary=status >= 500 or status == 429) from error
        except errors.AzureError as error:
            raise SourceUnavailable(f"{where}: {type(error).__name__}") from error
        except ValueError as error:
            raise UriInvalid("the settings for Azure cannot be used; is AZURE_STORAGE_KEY in base64?") from error
