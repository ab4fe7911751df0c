# SPDX-License-Identifier: Apache-2.0
"""Prometheus, engines' metrics pages and the resource metrics API: bounded GETs to addresses that are allowed.

The author of a policy chooses the addresses, so some are forbidden. Credentials come from Secrets of the policy's
namespace. The result is a number or a problem; the last result is shared by all readers of the same source.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import math
import re
import socket
import ssl
from collections.abc import Hashable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from controller.api.pod_spec_checks import parse_quantity
from controller.kube.api_resources import SECRETS
from controller.kube.cluster_access import ClusterAccess
from controller.kube.errors import ClusterAccessInvalid, ClusterError, Forbidden, NotFound
from extproc.api.addresses import is_local_or_metadata_host
from extproc.engines.prometheus_text import MetricsPageRefused, metric_lines, sample_number
from extproc.http_body import read_at_most

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from aiohttp.abc import ResolveResult

    from controller.kube.client import Client


Key = TypeVar("Key", bound=Hashable)


Found = TypeVar("Found")


# Entries that were not read for so long are dropped.
_FORGET_S: Final = 600.0
_KEYS = ("token", "ca.crt", "tls.crt", "tls.key")
_LONGEST: Final = 200
_SELECTOR: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\s*(\{[^{}]*\})?|\{[^{}]*\}")
# Lines of a metric, and of those with its name as a prefix: engines have a few.
_MOST_LINES: Final = 10_000
_WHICH: Final = "attache_sample"
# Of several series of one page, as of data-parallel ranks, these are shares: the fullest counts. Others add up.
_SHARES: Final = ("_perc", "_percent", "_ratio", "_usage", "_utilization")


class _Entry(Generic[Found]):
    def __init__(self) -> None:
        self.found: Found | None = None
        self.begun_at_s = float("-inf")
        self.asked_at_s = 0.0
        self.is_quick = True
        self.task: asyncio.Task[None] | None = None


class SharedFetch(Generic[Key, Found]):
    """``patience_s``: longest wait of a reader for a fetch. After a slower one readers do not wait, until a fetch is
    quick again; its result is used the next time.
    """

    def __init__(self, patience_s: float = 0.3) -> None:
        self._patience_s = patience_s
        self._entries: dict[Key, _Entry[Found]] = {}
        self._pruned_at_s = 0.0

    async def get(self, key: Key, fetch: Callable[[], Awaitable[Found]], max_age_s: float) -> Found | None:
        """What was fetched at most ``max_age_s`` ago, or else is fetched now; meanwhile what was fetched before; None
        if nothing was yet. ``fetch`` must not raise.
        """
        now_s = asyncio.get_running_loop().time()
        entry = self._entries.setdefault(key, _Entry())
        entry.asked_at_s = now_s
        if entry.task is None and now_s - entry.begun_at_s >= max_age_s:
            entry.begun_at_s = now_s
            entry.task = asyncio.create_task(self._fetch(entry, fetch), name=f"metric {key}")
        if entry.task is not None and entry.is_quick:
            await asyncio.wait([entry.task], timeout=self._patience_s)
            entry.is_quick = entry.task is None
        self._prune(now_s)
        return entry.found

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [one.task for one in self._entries.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._entries.clear()

    async def _fetch(self, entry: _Entry[Found], fetch: Callable[[], Awaitable[Found]]) -> None:
        try:
            entry.found = await fetch()
            entry.is_quick = asyncio.get_running_loop().time() - entry.begun_at_s <= self._patience_s
        finally:
            entry.task = None

    def _prune(self, now_s: float) -> None:
        if now_s - self._pruned_at_s < _FORGET_S:
            return
        self._pruned_at_s = now_s
        old = [key for key, one in self._entries.items() if one.task is None and now_s - one.asked_at_s > _FORGET_S]
        for key in old:
            del self._entries[key]


class AddressForbidden(OSError):
    """The address is forbidden; the message has the reason."""


def is_allowed_address(address: str) -> bool:
    """Whether an IP address may be one of a Prometheus; raises ValueError for a name."""
    ipaddress.ip_address(address.partition("%")[0])
    return not is_local_or_metadata_host(address)


class AddressPolicy:
    """``prefixes``: the only URL prefixes that may be requested, at any IP address; empty: all addresses but those that
    ``is_allowed_address`` refuses.
    """

    def __init__(self, prefixes: Sequence[str] = ()) -> None:
        self._prefixes = [URL(one) for one in prefixes]
        for one in self._prefixes:
            if one.scheme not in {"http", "https"} or not one.host or one.user or one.query_string or one.fragment:
                raise ValueError(f"{one} is no URL such as https://prometheus.monitoring.svc:9090")

    @property
    def has_prefixes(self) -> bool:
        """Whether there are prefixes."""
        return bool(self._prefixes)

    def checked_url(self, address: str) -> URL:
        """The URL of an address; raises NotAllowed."""
        try:
            url = URL(address)
        except ValueError as error:
            raise AddressForbidden(f"{address} is no URL: {error}") from None
        if url.scheme not in {"http", "https"} or not url.host:
            raise AddressForbidden(f"{address} is no URL with http or https")
        if url.user is not None or url.password is not None or url.query_string or url.fragment:
            raise AddressForbidden("the address must have neither a user, nor a query, nor a fragment; use secretRef")
        if self._prefixes:
            if not any(_is_below(url, one) for one in self._prefixes):
                raise AddressForbidden(
                    f"{url.origin()} is none of the addresses that the manager may ask (--prometheus-allow)"
                )
            return url
        try:
            good = is_allowed_address(url.host)
        except ValueError:
            if not set(url.host) - set("0123456789."):
                # some parsers read 2130706433 and 127.1 as 127.0.0.1, and numbers are not resolved
                raise AddressForbidden(f"{url.host} is neither a name nor an IP address with four numbers") from None
            return url  # a name: the resolver checks its addresses
        if not good:
            raise AddressForbidden(f"{url.host} is an address that the manager does not ask without --prometheus-allow")
        return url


def _is_below(url: URL, prefix: URL) -> bool:
    if (url.scheme, url.host, url.port) != (prefix.scheme, prefix.host, prefix.port):
        return False
    path, wanted = url.path.rstrip("/"), prefix.path.rstrip("/")
    return ".." not in url.parts and (path == wanted or path.startswith(wanted + "/"))


class CheckedResolver(AbstractResolver):
    """Drops forbidden IP addresses after the name is resolved: a name may resolve to another address later."""

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises NotAllowed if nothing is left."""
        found = await self._resolver.resolve(host, port, family)
        good = [one for one in found if is_allowed_address(one["host"])]
        if not good:
            raise AddressForbidden(
                f"{host} stands for an address that the manager does not ask without --prometheus-allow"
            )
        return good

    async def close(self) -> None:
        """Nothing is held."""
        await self._resolver.close()


class Credentials(msgspec.Struct, frozen=True):
    """``problem``: why there are none. ``tls``: None for the machine's authorities, without a client certificate."""

    headers: dict[str, str] = {}
    tls: ssl.SSLContext | None = None
    problem: str = ""
    version: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.version!r})"  # never a credential in a log


class SecretCredentialsReader:
    """``every_s``: how often a Secret in use is read."""

    def __init__(self, client: Client, every_s: float) -> None:
        self._client = client
        self._every_s = every_s
        self._latest = SharedFetch[tuple[str, str], Credentials]()
        self._known: dict[tuple[str, str], Credentials] = {}

    async def read_credentials(self, namespace: str, name: str) -> Credentials:
        """The credentials, or ``problem`` with what is wrong. Never raises."""
        key = namespace, name
        found = await self._latest.get(key, lambda: self._read(key), self._every_s)
        return found or Credentials(problem=f"the Secret {name} is not read yet")

    async def close(self) -> None:
        """Cancel running requests and drop all clients."""
        await self._latest.close()
        self._known.clear()

    async def _read(self, key: tuple[str, str]) -> Credentials:
        namespace, name = key
        before = self._known.get(key)
        try:
            secret = await self._client.get(SECRETS, name, namespace)
        except NotFound:
            return self._keep(key, Credentials(problem=f"there is no Secret {namespace}/{name}"))
        except Forbidden:
            message = (
                f"the manager may not read the Secret {namespace}/{name}; a Role must let it get this one by its name"
            )
            return self._keep(key, Credentials(problem=message))
        except ClusterError as error:
            return before or Credentials(problem=f"the Secret {namespace}/{name} cannot be read now: {error}")
        version = str(secret["metadata"].get("resourceVersion", ""))
        if before is not None and before.version == version and version:
            return before
        return self._keep(key, parse_credentials(secret.get("data") or {}, f"{namespace}/{name}", version))

    def _keep(self, key: tuple[str, str], found: Credentials) -> Credentials:
        self._known[key] = found
        return found


def parse_credentials(data: Mapping[str, Any], name: str, version: str) -> Credentials:
    """From the data of a Secret."""
    try:
        texts = {one: base64.b64decode(data.get(one) or "", validate=True).decode().strip() for one in _KEYS}
    except (binascii.Error, UnicodeDecodeError, TypeError):
        return Credentials(problem=f"the Secret {name} is not readable text", version=version)
    if not any(texts.values()):
        return Credentials(problem=f"the Secret {name} has none of {', '.join(_KEYS)}", version=version)
    if bool(texts["tls.crt"]) != bool(texts["tls.key"]):
        return Credentials(problem=f"the Secret {name} needs tls.crt and tls.key together", version=version)
    if any(ord(one) < 32 or ord(one) > 126 for one in texts["token"]):  # a line break would begin another header
        return Credentials(problem=f"the token in the Secret {name} is not one line of plain text", version=version)
    # the scheme alone matters
    access = ClusterAccess(
        "https://prometheus",
        ca=texts["ca.crt"],
        token=texts["token"],
        certificate=texts["tls.crt"],
        key=texts["tls.key"],
    )
    try:
        return Credentials(access.headers(), access.tls(), version=version)
    except ClusterAccessInvalid:
        return Credentials(problem=f"the certificates in the Secret {name} cannot be used", version=version)


class FetchFailed(Exception):
    """The page could not be fetched; the message has the reason, and nothing of the server's answer."""


async def fetch_page(
    http: aiohttp.ClientSession,
    url: URL | str,
    *,
    most_bytes: int,
    timeout_s: float,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    also: tuple[int, ...] = (),
) -> bytes:
    """The body. ``also``: further statuses whose body is returned, beside 200. Raises Failed."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with http.get(
            url, params=query, headers=headers, ssl=tls or True, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status != HTTPStatus.OK and answer.status not in also:
                raise FetchFailed(f"the server answers {answer.status}")
            body = await read_at_most(answer.content, most_bytes)
            if body is None:
                raise FetchFailed(f"the answer is longer than {most_bytes} bytes")
            return body
    except TimeoutError:
        raise FetchFailed(f"no answer within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise FetchFailed(f"the server's certificate is not trusted: {error.certificate_error}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FetchFailed(f"the server cannot be asked: {error}") from None


class MetricValue(msgspec.Struct, frozen=True):
    """``number``: None if there is none; ``problem`` has the reason. ``age_s``: of the sample. ``is_partial``: the
    server reports that its answer is incomplete.
    """

    number: float | None = None
    problem: str = ""
    age_s: float = 0.0
    is_partial: bool = False


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str = ""
    result: Any = None


class _PrometheusAnswer(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    data: _Data = _Data()
    error_type: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str]


_ANSWERS: Final = msgspec.json.Decoder(_PrometheusAnswer)


def promql_of_query(query: str) -> str:
    """The PromQL that is sent for a query. Prometheus returns the time of the evaluation, not of the sample; for a
    plain selector the sample's time is requested as well.
    """
    stripped = query.strip()
    if _SELECTOR.fullmatch(stripped) is None:
        return query
    value = f'label_replace({stripped}, "{_WHICH}", "value", "", "")'
    return f'{value} or label_replace(timestamp({stripped}), "{_WHICH}", "time", "", "")'


def prometheus_value(body: bytes) -> MetricValue:
    """From the answer to an instant query. No series, several, and what is no finite number are problems, never 0."""
    try:
        answer = _ANSWERS.decode(body)
        if answer.status != "success":
            message = f"{answer.error_type}: {answer.error}"[:_LONGEST]
            return MetricValue(problem=f"the query fails: {message}")
        return _of(answer)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return MetricValue(problem="the answer is not that of a Prometheus")


def _of(answer: _PrometheusAnswer) -> MetricValue:
    is_partial = bool(answer.warnings)
    if answer.data.result_type == "scalar":
        at_s, text = msgspec.convert(answer.data.result, tuple[float, str])
        return _finite(text, 0.0, is_partial=is_partial)
    if answer.data.result_type != "vector":
        return MetricValue(problem=f"the query gives a {answer.data.result_type}; it must give one number")
    series = msgspec.convert(answer.data.result, list[_Series])
    values = [one for one in series if one.metric.get(_WHICH) != "time"]
    times = [one for one in series if one.metric.get(_WHICH) == "time"]
    if not values:
        return MetricValue(problem="the query finds nothing")
    if len(values) > 1:
        return MetricValue(problem=f"the query gives {len(values)} series; it must give one, for instance with sum()")
    at_s, text = values[0].value
    age_s = max(0.0, at_s - min(float(one.value[1]) for one in times)) if times else 0.0
    return _finite(text, age_s, is_partial=is_partial)


def _finite(text: str, age_s: float, *, is_partial: bool) -> MetricValue:
    number = float(text)
    if not math.isfinite(number) or not math.isfinite(age_s):
        return MetricValue(problem=f"the query gives {text}")
    return MetricValue(number, age_s=age_s, is_partial=is_partial)


def page_values(page: bytes, names: Iterable[str]) -> dict[str, float]:
    """The metrics of these names on a page in Prometheus' text format; those that are not there, have very many series,
    or are no finite number, are left out.
    """
    found: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(MetricsPageRefused):
            numbers = [sample_number(line) for line in metric_lines(page, name.encode(), most=_MOST_LINES)]
            if numbers and all(map(math.isfinite, numbers)):
                found[name] = max(numbers) if name.endswith(_SHARES) else sum(numbers)
    return found


class PodUsage(msgspec.Struct, frozen=True):
    """What a pod uses: cores and bytes. ``at``: time of the sample as in the API; its age is left out."""

    cpu: float
    memory: float
    at: str = ""


def usage_by_pod(items: Iterable[Mapping[str, Any]]) -> dict[str, PodUsage]:
    """From the items of a PodMetricsList, by the pods' names. Pods with containers that have no usage are left out."""
    found: dict[str, PodUsage] = {}
    for item in items:
        containers = item.get("containers") or ()
        usages = [one.get("usage") or {} for one in containers]
        if not usages or any("cpu" not in one or "memory" not in one for one in usages):
            continue
        try:
            found[item["metadata"]["name"]] = PodUsage(
                cpu=sum(parse_quantity(one["cpu"]) for one in usages),
                memory=sum(parse_quantity(one["memory"]) for one in usages),
                at=str(item.get("timestamp", "")),
            )
        except (KeyError, ValueError):
            continue
    return found
