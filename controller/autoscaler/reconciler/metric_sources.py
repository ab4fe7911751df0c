# SPDX-License-Identifier: Apache-2.0
"""A policy's metrics of other sources than the gateways, by engine or in total, with their age."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from controller.autoscaler.decision.situation import MetricReading
from controller.autoscaler.reconciler.fair_semaphore import FairSemaphore
from controller.autoscaler.reconciler.metric_source_http import (
    AddressForbidden,
    AddressPolicy,
    CheckedResolver,
    Credentials,
    FetchFailed,
    MetricValue,
    PodUsage,
    SecretCredentialsReader,
    SharedFetch,
    fetch_page,
    page_values,
    prometheus_value,
    promql_of_query,
    usage_by_pod,
)
from controller.kube.api_resources import ApiResource, parse_timestamp
from controller.kube.errors import ClusterError, NotFound
from extproc.api.addresses import join_host_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.api.autoscaling import MetricTarget, PrometheusSource
    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.situation import Situation
    from controller.autoscaler.reconciler.target_resolver import ResolvedTarget
    from controller.kube.client import Client
    from controller.kube.pod_views import PodView

POD_METRICS: Final = ApiResource("metrics.k8s.io", "v1beta1", "pods", "PodMetrics")
# Bad Request and Unprocessable Entity: the body has Prometheus' error about the query.
_EXPLAINED: Final = (400, 422)
_LONGEST: Final = 300


class MetricSample(msgspec.Struct, frozen=True):
    """A value and when it was so, since the epoch."""

    value: MetricValue
    at_s: float


def age_limited_total(taken: MetricSample, now_s: float, policy: AutoscalingPolicySpec) -> MetricReading:
    """The sum with the limits of age: past the soft one it can only raise replicas; past the hard one it is unknown."""
    value, age_s = taken.value, now_s - taken.at_s
    if value.number is None:
        return MetricReading(at_s=taken.at_s, problem=value.problem)
    if age_s > policy.staleness.hard:
        return MetricReading(at_s=taken.at_s, problem=f"the last sample is {age_s:.0f} s old")
    is_old = age_s > policy.staleness.soft
    return MetricReading(at_s=taken.at_s, total=value.number, is_lower_bound=is_old or value.is_partial)


def entry_pods(target: ResolvedTarget) -> list[tuple[str, PodView]]:
    """The pod of each ready engine that has its page, by the engine's name: of a group the first one."""
    if target.kind is None:
        return []
    units: dict[str, list[PodView]] = defaultdict(list)
    for pod in target.pods:
        if not pod.is_ended:
            units[target.kind.unit_of(pod)].append(pod)
    entries = [min(pods, key=lambda pod: pod.name) for pods in units.values()]
    return [(one.name, one) for one in entries if one.ip and one.is_ready and not one.is_leaving]


def utilization_metric(
    name: str, used: Mapping[str, PodUsage], resolved: Sequence[ResolvedTarget], now_s: float, hard_s: float
) -> MetricReading:
    """Usage over requests of each engine, all of its pods together. One with a pod of unknown usage is missing."""
    values, at_s, lacks = dict[str, float](), now_s, False
    for target in resolved:
        if target.kind is None:
            continue
        units: dict[str, list[PodView]] = defaultdict(list)
        for pod in target.pods:
            if not pod.is_ended:
                units[target.kind.unit_of(pod)].append(pod)
        for pods in units.values():
            found = [used.get(pod.name) for pod in pods]
            known = [one for one in found if one is not None and now_s - (parse_timestamp(one.at) or now_s) <= hard_s]
            requested = sum(pod.cpu if name == "cpu" else pod.memory for pod in pods)
            lacks = lacks or not requested
            if len(known) == len(pods) and requested > 0:
                amount = sum(one.cpu if name == "cpu" else one.memory for one in known)
                values[min(pod.name for pod in pods)] = amount / requested
                at_s = min([at_s, *(parse_timestamp(one.at) or now_s for one in known)])
    if not values:
        why = f"the pods request no {name}" if lacks else f"there is no recent {name} usage of any engine"
        return MetricReading(at_s=now_s, problem=why)
    return MetricReading(at_s=at_s, by_engine=values)


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``timeout_s``: of one question. ``secrets_s``: how often a Secret in use is read. ``most_bytes``: of an answer of
    Prometheus, and of an engine's page. ``side_by_side``: pages of engines that are read at once, of which each
    namespace has a share.
    """

    prometheus_allow: tuple[str, ...] = ()
    timeout_s: float = 3.0
    secrets_s: float = 30.0
    most_answer_bytes: int = 256 * 1024
    most_page_bytes: int = 4 * 1024 * 1024
    side_by_side: int = 64


class _Page(msgspec.Struct, frozen=True):
    values: dict[str, float]
    at_s: float


class _Usages(msgspec.Struct, frozen=True):
    by_pod: dict[str, PodUsage]
    problem: str = ""


class MetricSources:
    """Sends each query to its server once a period, for all bindings. ``port_of``: of a ModelServer's engines."""

    def __init__(
        self,
        client: Client,
        settings: SourceSettings,
        clock: Callable[[], float],
        port_of: Callable[[str], int | None],
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._port_of = port_of
        self._allowed = AddressPolicy(settings.prometheus_allow)
        self._credentials = SecretCredentialsReader(client, settings.secrets_s)
        self._answers = SharedFetch[tuple[str, str, str], MetricSample]()
        self._pages = SharedFetch[tuple[str, tuple[str, ...]], _Page | None]()
        self._usages = SharedFetch[str, _Usages]()
        self._shares = FairSemaphore(settings.side_by_side)
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None

    async def close(self) -> None:
        """Ends what is under way."""
        for one in (self._answers, self._pages, self._usages):
            await one.close()
        await self._credentials.close()
        for session in self._sessions or ():
            await session.close()
        self._sessions = None

    async def with_metrics(
        self,
        namespace: str,
        policy: AutoscalingPolicySpec,
        resolved: Sequence[ResolvedTarget],
        situations: Sequence[Situation],
    ) -> tuple[Situation, ...]:
        """The situations with their metrics. ``namespace``: of the policy, whose Secrets are used."""
        wanted = [one for one in policy.metrics if one.source != "Gateway"]
        if not wanted:
            return tuple(situations)
        found = []
        for situation in situations:
            stage = {one.spec.name for one in situation.targets}
            mine = [one for one in resolved if one.spec.name in stage]
            metrics = await asyncio.gather(*(self._metric(namespace, policy, one, mine) for one in wanted))
            named = {one.name: metric for one, metric in zip(wanted, metrics, strict=True)}
            found.append(msgspec.structs.replace(situation, metrics={**situation.metrics, **named}))
        return tuple(found)

    async def _metric(
        self, namespace: str, policy: AutoscalingPolicySpec, one: MetricTarget, resolved: Sequence[ResolvedTarget]
    ) -> MetricReading:
        # a reconcile comes a period after the one before, or a little earlier
        max_age_s = 0.9 * policy.period
        if one.prometheus is not None:
            taken = await self._asked(namespace, one.prometheus, max_age_s)
            return age_limited_total(taken, self._clock(), policy)
        if one.source == "Engine":
            return await self._of_engines(namespace, one, resolved, max_age_s, policy)
        return await self._of_pods(namespace, one, resolved, max_age_s, policy)

    async def _asked(self, namespace: str, source: PrometheusSource, max_age_s: float) -> MetricSample:
        now_s = self._clock()
        try:
            url = self._allowed.checked_url(source.address)
        except AddressForbidden as error:
            return MetricSample(MetricValue(problem=str(error)), now_s)
        credentials, identity = Credentials(), ""
        if source.secret_ref is not None:
            if url.scheme != "https":
                return MetricSample(MetricValue(problem="credentials are sent with https alone"), now_s)
            credentials = await self._credentials.read_credentials(namespace, source.secret_ref)
            if credentials.problem:
                return MetricSample(MetricValue(problem=credentials.problem), now_s)
            identity = f"{namespace}/{source.secret_ref}/{credentials.version}"

        async def ask() -> MetricSample:
            at_s = self._clock()
            try:
                body = await fetch_page(
                    self._session(is_checked=not self._allowed.has_prefixes),
                    url.joinpath("api", "v1", "query"),
                    query={"query": promql_of_query(source.query), "timeout": f"{self._settings.timeout_s:g}s"},
                    headers={"accept": "application/json", **credentials.headers},
                    tls=credentials.tls,
                    most_bytes=self._settings.most_answer_bytes,
                    timeout_s=self._settings.timeout_s,
                    also=_EXPLAINED,
                )
            except FetchFailed as error:
                return MetricSample(MetricValue(problem=str(error)[:_LONGEST]), at_s)
            value = prometheus_value(body)
            return MetricSample(value, at_s - value.age_s)

        found = await self._answers.get((str(url), source.query, identity), ask, max_age_s)
        return found or MetricSample(MetricValue(problem="no answer yet"), now_s)

    async def _of_engines(
        self,
        namespace: str,
        one: MetricTarget,
        resolved: Sequence[ResolvedTarget],
        max_age_s: float,
        policy: AutoscalingPolicySpec,
    ) -> MetricReading:
        """Of each ready engine, by its name. Those without a page, or without the metric on it, are missing."""
        path = one.engine.path if one.engine is not None else "/metrics"
        asking: dict[str, str] = {}
        for target in resolved:
            port = (one.engine.port if one.engine is not None else None) or self._port_of(target.server)
            if port is None:
                continue
            for name, pod in entry_pods(target):
                asking[name] = f"http://{join_host_port(pod.ip, port)}/{path.lstrip('/')}"
        names = tuple(sorted({each.name for each in policy.metrics if each.source == "Engine"}))
        pages = await asyncio.gather(*(self._page(namespace, url, names, max_age_s) for url in asking.values()))
        since_s = self._clock() - policy.staleness.soft
        read = {name: page for name, page in zip(asking, pages, strict=True) if page is not None}
        values = {
            name: page.values[one.name]
            for name, page in read.items()
            if one.name in page.values and page.at_s >= since_s
        }
        if not values:
            return MetricReading(at_s=self._clock(), problem=f"no engine's page has a recent {one.name}")
        return MetricReading(at_s=min(read[name].at_s for name in values), by_engine=values)

    async def _page(self, namespace: str, url: str, names: tuple[str, ...], max_age_s: float) -> _Page | None:
        async def read() -> _Page | None:
            at_s = self._clock()
            try:
                async with self._shares.acquire(namespace):
                    body = await fetch_page(
                        self._session(is_checked=False),
                        url,
                        most_bytes=self._settings.most_page_bytes,
                        timeout_s=self._settings.timeout_s,
                    )
            except FetchFailed:
                return None
            return _Page(page_values(body, names), at_s)

        return await self._pages.get((url, names), read, max_age_s)

    async def _of_pods(
        self,
        namespace: str,
        one: MetricTarget,
        resolved: Sequence[ResolvedTarget],
        max_age_s: float,
        policy: AutoscalingPolicySpec,
    ) -> MetricReading:
        if one.name not in {"cpu", "memory"}:
            return MetricReading(
                at_s=self._clock(), problem=f"there is no resource metric {one.name}; there are cpu and memory"
            )
        found = await self._usages.get(namespace, lambda: self._used(namespace), max_age_s)
        if found is None or found.problem:
            message = found.problem if found is not None else "no answer yet"
            return MetricReading(at_s=self._clock(), problem=message)
        return utilization_metric(one.name, found.by_pod, resolved, self._clock(), policy.staleness.hard)

    async def _used(self, namespace: str) -> _Usages:
        try:
            return _Usages(usage_by_pod((await self._client.list(POD_METRICS, namespace)).items))
        except NotFound:
            return _Usages({}, "the cluster does not serve metrics.k8s.io; it needs a metrics server")
        except ClusterError as error:
            return _Usages({}, f"the resource metrics cannot be read: {error}"[:_LONGEST])

    def _session(self, *, is_checked: bool) -> aiohttp.ClientSession:
        if self._sessions is None:
            jar = aiohttp.DummyCookieJar
            self._sessions = (
                aiohttp.ClientSession(cookie_jar=jar()),
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(resolver=CheckedResolver(), ttl_dns_cache=10), cookie_jar=jar()
                ),
            )
        return self._sessions[is_checked]
