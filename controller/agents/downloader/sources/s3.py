# SPDX-License-Identifier: Apache-2.0
"""s3://: Amazon S3 and what speaks its protocol (MinIO, Ceph, versitygw, ...)."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import TYPE_CHECKING, Any, Final

from controller.agents.downloader.core.errors import AccessRefused, NotThere, Unavailable, UriInvalid
from controller.agents.downloader.core.key import listing_digest
from controller.agents.downloader.core.listing import Checksum, Listing, RemoteFile
from controller.agents.downloader.libraries import library
from controller.agents.downloader.sources.prefixes import path_below
from controller.agents.downloader.transfer import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.agents.downloader.core.uri import BucketPlace
    from controller.agents.downloader.credentials import Environment

_SIGNED_FOR_S: Final = 3600
_HEADS_AT_ONCE: Final = 8
_FULL: Final = "FULL_OBJECT"


class S3Source:
    """boto3 finds credentials, region and endpoint as everywhere (environment, files, web identity) and signs URLs.

    Further settings: ``AWS_NO_SIGN_REQUEST`` for public buckets, ``AWS_S3_ADDRESSING_STYLE`` (path, virtual, auto).
    """

    def __init__(self, place: BucketPlace, environment: Environment) -> None:
        self._place = place
        boto3 = library("boto3", "s3")
        botocore = library("botocore", "s3")
        endpoint = environment.get("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        style = environment.get("AWS_S3_ADDRESSING_STYLE") or ("path" if endpoint else "auto")
        settings: dict[str, Any] = {
            "s3": {"addressing_style": style},
            "signature_version": botocore.UNSIGNED if environment.is_on("AWS_NO_SIGN_REQUEST") else "s3v4",
            "retries": {"total_max_attempts": 1},  # whoever asks repeats
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
        self._errors = library("botocore.exceptions", "s3")
        try:
            self._client = boto3.session.Session(**keys, region_name=region).client(
                "s3", endpoint_url=endpoint or None, config=library("botocore.config", "s3").Config(**settings)
            )
        except (self._errors.BotoCoreError, ValueError) as error:
            raise UriInvalid(f"the settings for S3 cannot be used: {error}") from error

    async def resolve(self, revision: str) -> Listing:
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
        return Listing(pinned, files)

    async def request(self, file: RemoteFile, start: int, end: int | None) -> Request:
        """A URL that is signed for an hour."""
        key, _, version = file.locator.partition("\n")
        asked = {"Bucket": self._place.bucket, "Key": key} | ({"VersionId": version} if version else {})
        url = await asyncio.to_thread(self._called, self._signed, asked)
        return Request(url)

    def _signed(self, asked: Mapping[str, str]) -> str:
        return str(self._client.generate_presigned_url("get_object", Params=dict(asked), ExpiresIn=_SIGNED_FOR_S))

    def _keys(self) -> list[str]:
        place = self._place
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
        found = [str(one["Key"]) for page in pages for one in page.get("Contents", ())]
        return [key for key in found if path_below(place.prefix, key)]

    def _head(self, key: str) -> Mapping[str, Any]:
        bucket = self._place.bucket
        head = dict(self._client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED"))
        if "-" in head.get("ETag", "") and head.get("ContentLength"):
            try:
                first = self._client.head_object(Bucket=bucket, Key=key, PartNumber=1)
                head["FirstPart"] = first.get("ContentLength")
            except self._errors.ClientError:
                head["FirstPart"] = None  # not every server knows parts; the size is checked in any case
        return head

    def _file(self, key: str, head: Mapping[str, Any]) -> RemoteFile:
        version = str(head.get("VersionId", ""))
        return RemoteFile(
            path_below(self._place.prefix, key),
            int(head["ContentLength"]),
            key if version in ("", "null") else f"{key}\n{version}",
            checksum_in(head),
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
                raise NotThere(f"{where}: {code or 'there is no such bucket or object'}") from error
            raise Unavailable(f"{where}: {code or status}", is_temporary=status >= 500 or status == 429) from error
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.CredentialRetrievalError) as error:
            raise AccessRefused(
                f"{where}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a service account"
                " with a role, or AWS_NO_SIGN_REQUEST=true for a public bucket"
            ) from error
        except errors.NoRegionError as error:
            raise UriInvalid(f"{where}: set AWS_REGION") from error
        except errors.BotoCoreError as error:
            raise Unavailable(f"{where}: {type(error).__name__}") from error


def checksum_in(head: Mapping[str, Any]) -> Checksum | None:
    """The best checksum of the whole object that its head has: a full one, else the ETag where that is an MD5."""
    if head.get("ChecksumType", _FULL) == _FULL:
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
