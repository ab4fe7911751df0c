# SPDX-License-Identifier: Apache-2.0
"""URIs of weights as typed places."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from controller.agents.downloader.core.errors import UriInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HUB: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:[@:](?P<revision>refs/(?:pr|convert)/[\w.-]+|[\w.-]+))?(?:/(?P<path>.+))?",
    re.ASCII,
)
_OCI: Final = re.compile(
    r"(?P<registry>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-fA-F:.]+\](?::\d+)?)/(?P<repository>[a-z0-9][a-z0-9._/-]*?)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_CLAIM: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
# parameters that sign a URL: they differ from call to call, and are credentials
_SIGNING: Final = re.compile(
    r"x-amz-.*|x-goog-.*|sig|se|st|sp|sv|sr|spr|sks|skt|ske|skv|skoid|sktid|signature|expires|policy|key-pair-id"
    r"|awsaccesskeyid|googleaccessid|(?:access_)?token|api_?key",
    re.IGNORECASE,
)


class HubLocation(msgspec.Struct, frozen=True):
    """A repository of a Hugging Face hub, and optionally a folder or file in it. No revision: ``main``."""

    repo: str
    revision: str = ""
    path: str = ""

    def canonical(self) -> str:
        """One text for the same place, without its revision."""
        return f"hf://{self.repo}" + (f"/{self.path}" if self.path else "")


class BucketLocation(msgspec.Struct, frozen=True):
    """An object of a bucket, or all objects below a prefix. ``scheme``: s3 or gs."""

    scheme: str
    bucket: str
    prefix: str

    def canonical(self) -> str:
        """One text for the same place."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


class AzureLocation(msgspec.Struct, frozen=True):
    """A blob of a container, or all blobs below a prefix. No account: that of the environment."""

    account_host: str
    container: str
    prefix: str

    def canonical(self) -> str:
        """One text for the same place."""
        return f"az://{self.account_host}/{self.container}/{self.prefix}"


class WebLocation(msgspec.Struct, frozen=True):
    """A file on a web server. ``url`` has its query, which may hold credentials."""

    url: str

    def canonical(self) -> str:
        """One text for the same place: without what signs the URL, and so without credentials."""
        parts = urlsplit(self.url)
        kept = [(name, value) for name, value in parse_qsl(parts.query, True) if not _SIGNING.fullmatch(name)]
        return parts._replace(query=urlencode(kept), fragment="").geturl()


class OciLocation(msgspec.Struct, frozen=True):
    """An artefact or image of a registry. ``reference``: a tag, or a digest, which wins over a tag."""

    registry: str
    repository: str
    reference: str

    def canonical(self) -> str:
        """One text for the same repository; the digest is the revision."""
        return f"oci://{self.registry}/{self.repository}"


class HdfsLocation(msgspec.Struct, frozen=True):
    """A file or directory of HDFS, by the name node's HTTP address."""

    authority: str
    path: str

    def canonical(self) -> str:
        """One text for the same place."""
        return f"hdfs://{self.authority}{self.path}"


class PvcLocation(msgspec.Struct, frozen=True):
    """A path on a PersistentVolumeClaim that is mounted into the pod."""

    claim: str
    path: str

    def canonical(self) -> str:
        """One text for the same place."""
        return f"pvc://{self.claim}/{self.path}"


class FileLocation(msgspec.Struct, frozen=True):
    """An absolute path of the container."""

    path: str

    def canonical(self) -> str:
        """One text for the same place."""
        return f"file://{self.path}"


Location = (
    HubLocation | BucketLocation | AzureLocation | WebLocation | OciLocation | HdfsLocation | PvcLocation | FileLocation
)


def parse_uri(uri: str) -> Location:
    """The place that ``uri`` names; raises UriInvalid, whose message never repeats credentials."""
    scheme, found, rest = uri.partition("://")
    read = _READERS.get(scheme.lower())
    if not found or read is None:
        raise UriInvalid(f"the URI must begin with one of {', '.join(f'{name}://' for name in _READERS)}")
    if "\0" in uri or any(character in uri for character in "\r\n\t "):
        raise UriInvalid("the URI has a space or a control character in it")
    return read(scheme.lower(), rest)


def redact_uri(uri: str) -> str:
    """``uri`` as logs and messages may show it: without query and user information."""
    head, found, rest = uri.partition("://")
    bare = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = bare.partition("/")
    if head.lower() in ("http", "https"):
        authority = authority.rpartition("@")[2]
    return f"{head}{found}{authority}{slash}{path}"


def _hub(_: str, rest: str) -> HubLocation:
    found = _HUB.fullmatch(rest.rstrip("/"))
    if found is None:
        raise UriInvalid("write hf://ORGANISATION/MODEL, hf://ORGANISATION/MODEL@REVISION or .../MODEL@REVISION/FOLDER")
    return HubLocation(found["repo"], found["revision"] or "", _relative(found["path"] or ""))


def _bucket(scheme: str, rest: str) -> BucketLocation:
    bucket, _, prefix = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", bucket):
        raise UriInvalid(f"write {scheme}://BUCKET/PATH")
    return BucketLocation(scheme, bucket, prefix)


def _azure(_: str, rest: str) -> AzureLocation:
    host, container, prefix = "", *rest.partition("/")[::2]
    if "." in container:
        host, (container, prefix) = container, prefix.partition("/")[::2]
    if not re.fullmatch(r"\$root|\$web|[a-z0-9](?:[a-z0-9-]{1,61}[a-z0-9])", container):
        raise UriInvalid("write az://CONTAINER/PATH or az://ACCOUNT.blob.core.windows.net/CONTAINER/PATH")
    return AzureLocation(host, container, prefix)


def _web(scheme: str, rest: str) -> WebLocation:
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError as error:
        raise UriInvalid("the URL has no host, or a port that is no number") from error
    if "@" in parts.netloc:
        raise UriInvalid("no user or password in the URL: put ATTACHE_HTTP_HEADERS into a Secret instead")
    if not has_host:
        raise UriInvalid("the URL has no host")
    return WebLocation(parts._replace(fragment="").geturl())


def _oci(_: str, rest: str) -> OciLocation:
    found = _OCI.fullmatch(rest)
    if found is None:
        raise UriInvalid("write oci://REGISTRY/REPOSITORY:TAG or oci://REGISTRY/REPOSITORY@sha256:DIGEST")
    return OciLocation(found["registry"], found["repository"], found["digest"] or found["tag"] or "latest")


def _hdfs(_: str, rest: str) -> HdfsLocation:
    authority, slash, path = rest.partition("/")
    if not slash or "@" in authority or not re.fullmatch(r"[A-Za-z0-9.\[\]:-]+", authority):
        raise UriInvalid("write hdfs://NAMENODE:PORT/PATH with the port of WebHDFS (9870)")
    return HdfsLocation(authority, "/" + _relative(unquote(path)))


def _claim(_: str, rest: str) -> PvcLocation:
    claim, _, path = rest.partition("/")
    if not _CLAIM.fullmatch(claim):
        raise UriInvalid("write pvc://CLAIM/PATH")
    return PvcLocation(claim, _relative(path))


def _file(_: str, rest: str) -> FileLocation:
    if not rest.startswith("/"):
        raise UriInvalid("write file:///ABSOLUTE/PATH")
    return FileLocation("/" + _relative(unquote(rest)))


def _relative(path: str) -> str:
    """``path`` without empty parts; raises UriInvalid if it leads upwards."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UriInvalid("no '..' in the path")
    return "/".join(parts)


_READERS: Final[Mapping[str, Callable[[str, str], Location]]] = {
    "hf": _hub,
    "s3": _bucket,
    "gs": _bucket,
    "az": _azure,
    "https": _web,
    "http": _web,
    "oci": _oci,
    "pvc": _claim,
    "hdfs": _hdfs,
    "file": _file,
}
