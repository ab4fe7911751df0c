# SPDX-License-Identifier: Apache-2.0
"""Adapters on demand: what is read, and what is refused with what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.api.adapter_loading import AdapterSource
from extproc.api.errors import ConfigInvalid
from extproc.api.load import load

if TYPE_CHECKING:
    from extproc.api.snapshot import Snapshot

ONE = "{name: a, source: /adapters/a}"


def loaded(spec: str) -> Snapshot:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec: {{model: m, endpoints: [{{address: "10.0.0.1:8000"}}], {spec}}}
"""
    return load({"a.yaml": text.encode()})


def test_adapters_have_names_and_sources_and_a_request_waits_a_minute() -> None:
    (server,) = loaded(f"adapterLoading: {{adapters: [{ONE}]}}").servers
    loading = server.spec.adapter_loading
    assert loading is not None
    assert loading.adapters == (AdapterSource(name="a", source="/adapters/a"),)
    assert (loading.port, loading.slots, float(loading.timeout)) == (None, None, 60.0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            f"adapterLoading: {{adapters: [{ONE}, {ONE}]}}",
            "spec.adapterLoading.adapters[1].name: 'a' is listed twice; write each adapter once",
        ),
        (
            "adapterLoading: {adapters: [{name: m, source: /m}]}",
            "spec.adapterLoading.adapters[0].name: 'm' is the base model; give the adapter another name",
        ),
        (
            f"engine: SGLang, adapterLoading: {{adapters: [{ONE}]}}",
            (
                "spec.adapterLoading: SGLang is asked to load nothing; write port, of the runtime agents beside the"
                " engines"
            ),
        ),
        (
            f"pdGroup: {{prefillLabels: {{a: p}}, decodeLabels: {{a: d}}}}, adapterLoading: {{adapters: [{ONE}]}}",
            "spec.adapterLoading: has no effect beside pdGroup",
        ),
        (f"adapterLoading: {{adapters: [{ONE}], timeout: 0s}}", "spec.adapterLoading.timeout: Envoy takes no 0s here"),
        ("adapterLoading: {adapters: []}", "spec.adapterLoading.adapters"),
    ],
)
def test_what_could_not_work_is_refused(spec: str, said: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        loaded(spec)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "wait_s"),
    [
        ("scrapeInterval: 1s", 0.0),
        (f"adapterLoading: {{adapters: [{ONE}]}}", 60.0),
        (f"flowControl: {{timeout: 20s, noEndpointTimeout: 5s}}, adapterLoading: {{adapters: [{ONE}]}}", 80.0),
    ],
)
def test_a_request_may_wait_for_its_adapter_and_then_in_the_queue(spec: str, wait_s: float) -> None:
    snapshot = loaded(spec)
    assert snapshot.longest_wait_s_of(snapshot.servers[0].spec) == wait_s
