# SPDX-License-Identifier: Apache-2.0
"""Answers of sources become numbers or reasons, never made-up zeros; only allowed addresses are asked; fetches are
shared.
"""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.api.autoscaling_binding import ObjectReference, ScaleTarget
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.reconciler.metric_source_http import (
    AddressForbidden,
    AddressPolicy,
    CheckedResolver,
    MetricValue,
    PodUsage,
    SharedFetch,
    page_values,
    parse_credentials,
    prometheus_value,
    promql_of_query,
    usage_by_pod,
)
from controller.autoscaler.reconciler.metric_sources import (
    MetricSample,
    age_limited_total,
    entry_pods,
    utilization_metric,
)
from controller.autoscaler.reconciler.scalables import find_scalable_kind
from controller.autoscaler.reconciler.target_resolver import ResolvedTarget
from controller.kube.api_resources import MODEL_INFERS
from controller.kube.pod_views import PodView
from controller.models.model_infer import names


def answer(*series: tuple[dict[str, str], float, str], **more: object) -> bytes:
    result = [{"metric": labels, "value": [at_s, text]} for labels, at_s, text in series]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}, **more}).encode()


def test_one_series_is_a_number() -> None:
    assert prometheus_value(answer(({}, 100.0, "7.5"))) == MetricValue(7.5)
    scalar = {"status": "success", "data": {"resultType": "scalar", "result": [100.0, "3"]}}
    assert prometheus_value(json.dumps(scalar).encode()) == MetricValue(3.0)


def test_the_age_is_that_of_the_sample_itself() -> None:
    marked = [({"attache_sample": "value"}, 100.0, "7"), ({"attache_sample": "time"}, 100.0, "80")]
    assert prometheus_value(answer(*marked)) == MetricValue(7.0, age_s=20.0)
    assert promql_of_query("sum(up)") == "sum(up)"
    assert promql_of_query(' queue{model="a"} ').startswith('label_replace(queue{model="a"}, ')
    assert "or label_replace(timestamp(up)," in promql_of_query("up")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (answer(), "finds nothing"),
        (answer(({}, 1.0, "NaN")), "gives NaN"),
        (answer(({}, 1.0, "+Inf")), "gives +Inf"),
        (answer(({"a": "1"}, 1.0, "1"), ({"a": "2"}, 1.0, "2")), "gives 2 series"),
        (b'{"status":"error","errorType":"bad_data","error":"parse error"}', "bad_data: parse error"),
        (b'{"status":"success","data":{"resultType":"matrix","result":[]}}', "gives a matrix"),
        (
            b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"x"]}]}}',
            "not that of",
        ),
        (b"<html>", "not that of"),
        (b'{"status":"success","data":{"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "not that of"),
        (b"{}", "not that of"),
    ],
)
def test_what_is_no_number_is_a_problem(body: bytes, says: str) -> None:
    found = prometheus_value(body)
    assert found.number is None
    assert says in found.problem


def test_an_answer_from_part_of_the_data_asks_for_more_alone() -> None:
    policy = AutoscalingPolicySpec()
    partial = prometheus_value(answer(({}, 1.0, "2"), warnings=["a store is away"]))
    assert age_limited_total(MetricSample(partial, 50.0), 51.0, policy).is_lower_bound
    whole = MetricValue(2.0)
    assert not age_limited_total(MetricSample(whole, 50.0), 51.0, policy).is_lower_bound
    # older than soft, 15 s; older than hard, 60 s
    assert age_limited_total(MetricSample(whole, 50.0), 66.0, policy).is_lower_bound
    old = age_limited_total(MetricSample(whole, 50.0), 111.0, policy)
    assert (old.total, old.problem) == (None, "the last sample is 61 s old")


def test_an_engines_page_is_read_by_whole_names() -> None:
    page = (
        b"# HELP vllm:num_requests_waiting of requests\n"
        b'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} 4.0 1700000000000\n'
        b"vllm:num_requests_waiting_total 100\n"
        b'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        b'broken{a="} 7"} NaN\nodd{a="} 7"} 2\n'
    )
    names = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "broken", "odd", "absent")
    assert page_values(page, names) == {"vllm:num_requests_waiting": 7.0, "vllm:kv_cache_usage_perc": 0.5, "odd": 2.0}


@pytest.mark.parametrize("size", [0, 100])
def test_an_engines_page_of_endless_series_says_nothing(size: int) -> None:
    page = b"".join(b'a{x="%d"} 1\n' % number for number in range(size * 1000)) + b"b 2\n"
    assert page_values(page, ("a", "b")) == {"b": 2.0}


_LINE = st.sampled_from([b"a 1", b"a", b"ab 2", b"a{} 3", b'a{x="} 4"} 5', b" a 6", b"a\t7 8", b"", b"b nan", b"b -1"])


@given(st.lists(_LINE, max_size=8), st.booleans())
def test_an_engines_page_is_read_as_by_lines(lines: list[bytes], ends: bool) -> None:
    page = b"\n".join(lines) + b"\n" * ends
    expected = {}
    for name in (b"a", b"ab", b"b"):
        form = re.compile(re.escape(name) + rb"(?:\{.*\})?[ \t]+([^ \t]+)")
        numbers = [float(found[1]) for line in lines if (found := form.match(line)) is not None]
        if numbers and all(map(math.isfinite, numbers)):
            expected[name.decode()] = sum(numbers)
    assert page_values(page, ("a", "ab", "b")) == expected


def test_usage_is_that_of_all_containers() -> None:
    containers = [{"usage": {"cpu": "1500000000n", "memory": "1Gi"}}, {"usage": {"cpu": "250m", "memory": "512Mi"}}]
    items = [
        {"metadata": {"name": "a"}, "timestamp": "2026-01-01T00:00:00Z", "containers": containers},
        {"metadata": {"name": "b"}, "containers": [{"usage": {"cpu": "1"}}]},
    ]
    found = usage_by_pod(items)
    assert set(found) == {"a"}
    assert (found["a"].cpu, found["a"].memory) == (1.75, 1.5 * 2**30)


@pytest.mark.parametrize(
    "address",
    [
        "http://169.254.169.254/latest",
        "http://127.0.0.1:9090",
        "http://[::1]:9090",
        "http://127.1:9090",
        "http://2130706433",
        "http://127.0.0.1.:9090",
        "http://0",
        "http://[::ffff:127.0.0.1]:9090",
        "http://[fe80::1]",
        "http://0.0.0.0",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://[fd00:ec2::254]",
        "http://100.100.100.200",
        "https://user:secret@prometheus",
        "https://prometheus/?query=1",
    ],
)
def test_addresses_that_policies_must_not_name(address: str) -> None:
    with pytest.raises(AddressForbidden):
        AddressPolicy().checked_url(address)


def test_a_list_of_allowed_addresses_is_all_that_is_allowed() -> None:
    allowed = AddressPolicy(["https://prometheus:9090/team", "http://127.0.0.1:9090"])
    for good in ("https://prometheus:9090/team", "https://prometheus:9090/team/a", "http://127.0.0.1:9090/x"):
        allowed.checked_url(good)
    for bad in ("https://prometheus:9090/teams", "https://prometheus.evil:9090/team", "http://prometheus:9090/team"):
        with pytest.raises(AddressForbidden, match="--prometheus-allow"):
            allowed.checked_url(bad)
    with pytest.raises(ValueError, match="no URL"):
        AddressPolicy(["prometheus:9090"])


async def test_names_that_stand_for_this_machine_are_refused() -> None:
    resolver = CheckedResolver()
    with pytest.raises(AddressForbidden):
        await resolver.resolve("localhost", 9090)
    await resolver.close()


def test_a_token_cannot_bring_headers_of_its_own() -> None:
    # base64 of "a\nb: c"
    assert "one line" in parse_credentials({"token": "YQpiOiBj"}, "n/s", "1").problem
    assert parse_credentials({"token": "YQo="}, "n/s", "1").headers == {"authorization": "Bearer a"}
    assert "none of" in parse_credentials({}, "n/s", "1").problem
    assert "together" in parse_credentials({"tls.crt": "YQ=="}, "n/s", "1").problem


async def test_many_askers_share_a_fetch_and_a_slow_one_holds_nobody_up() -> None:
    latest, fetches, gate = SharedFetch[str, int](patience_s=0.05), 0, asyncio.Event()

    async def fetch() -> int:
        nonlocal fetches
        fetches += 1
        await gate.wait()
        return fetches

    assert await asyncio.gather(*(latest.get("a", fetch, 60.0) for _ in range(9))) == [None] * 9
    assert await latest.get("a", fetch, 0.0) is None
    assert fetches == 1
    gate.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert await latest.get("a", fetch, 60.0) == 1
    assert await latest.get("a", fetch, 0.0) in {1, 2}
    await latest.close()


def pod(name: str, *, cpu: float, group: str) -> PodView:
    labels_ = {names.GROUP: group}
    return PodView(
        key=f"shop/{name}", name=name, uid=name, labels=labels_, ip="10.0.0.1", is_ready=True, created_at_s=0.0, cpu=cpu
    )


def resolved(*pods: PodView) -> ResolvedTarget:
    kind = find_scalable_kind(MODEL_INFERS.group, MODEL_INFERS.kind)
    reference = ObjectReference(api_version=MODEL_INFERS.api_version, kind=MODEL_INFERS.kind, name="llama")
    spec = ScaleTarget(name="main", ref=reference, max_replicas=9)
    return ResolvedTarget(
        spec=spec, place=("shop", MODEL_INFERS.group, MODEL_INFERS.kind, "llama"), kind=kind, pods=pods
    )


def test_usage_is_a_share_of_what_all_pods_of_an_engine_request() -> None:
    target = resolved(pod("a-0", cpu=2.0, group="0"), pod("a-1", cpu=2.0, group="0"), pod("b-0", cpu=4.0, group="1"))
    used = {"a-0": PodUsage(cpu=1.0, memory=0.0), "a-1": PodUsage(cpu=2.0, memory=0.0)}
    found = utilization_metric("cpu", used, [target], 1000.0, 60.0)
    assert found.by_engine == {"a-0": 0.75}
    # half of an engine is no engine
    partly = utilization_metric("cpu", {"a-0": used["a-0"]}, [target], 1000.0, 60.0)
    assert (partly.by_engine, partly.problem) == (None, "there is no recent cpu usage of any engine")
    old = {name: PodUsage(one.cpu, one.memory, "1970-01-01T00:10:00Z") for name, one in used.items()}
    assert utilization_metric("cpu", old, [target], 1000.0, 60.0).by_engine is None
    assert utilization_metric("cpu", old, [target], 650.0, 60.0).at_s == 600.0
    assert utilization_metric("memory", used, [target], 1000.0, 60.0).problem == "the pods request no memory"
    assert [name for name, _ in entry_pods(target)] == ["a-0", "b-0"]
