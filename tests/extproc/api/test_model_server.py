# SPDX-License-Identifier: Apache-2.0
"""ModelServer: activation, and adapters on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.model_server import AdapterSource

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

SERVER = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [], activation: {%s}}
"""


def test_defaults() -> None:
    (server,) = load_snapshot({"a.yaml": (SERVER % "").encode()}).servers
    activation = server.spec.activation
    assert activation is not None
    assert (activation.hold_timeout, activation.start_time, activation.max_requests) == (600.0, 60.0, 1000)
    assert activation.max_bytes == 256 * 1024 * 1024


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("holdTimeout: 2h", "spec.activation.holdTimeout"),
        ("holdTimeout: 0s", "spec.activation.holdTimeout"),
        ("startTime: 0s", "spec.activation.startTime"),
        ("maxRequests: 0", "spec.activation.maxRequests"),
        ("keepAlive: true", "spec.activation"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(given: str, place: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": (SERVER % given).encode()})
    assert place in str(caught.value)


ONE = "{name: a, source: /adapters/a}"
ROLES = "prefillLabels: {a: p}, decodeLabels: {a: d}"


def loaded(spec: str) -> Snapshot:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec: {{model: m, endpoints: [{{address: "10.0.0.1:8000"}}], {spec}}}
"""
    return load_snapshot({"a.yaml": text.encode()})


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
            ("spec.adapterLoading: extproc cannot ask SGLang to load adapters; write port, that of the runtime agents"),
        ),
        (
            f"pdGroup: {{prefillLabels: {{a: p}}, decodeLabels: {{a: d}}}}, adapterLoading: {{adapters: [{ONE}]}}",
            "spec.adapterLoading: has no effect beside pdGroup",
        ),
        (
            f"protocol: V2, adapterLoading: {{adapters: [{ONE}]}}",
            "models of a V2 server are loaded by the runtime agents beside the servers; write their port",
        ),
        (
            f"protocol: V2-gRPC, adapterLoading: {{port: 9000, adapters: [{ONE}]}}",
            "servers of protocol V2-gRPC load no models on demand; remove it",
        ),
        (
            "protocol: V2, adapterLoading: {port: 9000, adapters: [{name: .., source: /m}]}",
            "'..' is no segment of a path",
        ),
        (
            f"adapterLoading: {{adapters: [{ONE}], memory: 1Gi}}",
            "'a' has no memory, which is needed beside memory; write what it takes on a server",
        ),
        (
            "adapterLoading: {memory: 1Gi, adapters: [{name: a, source: /a, memory: 1.5Gi}]}",
            "'a' needs 1.5Gi of memory, more than the 1Gi of memory; raise that, or remove the model",
        ),
        (
            "adapterLoading: {memory: 1Ki, adapters: [{name: a, source: /a, memory: 1, pinned: true},"
            " {name: b, source: /b, memory: 1Ki}]}",
            "'b' needs 1Ki of memory, and the pinned models leave 1023 bytes of the 1Ki of memory",
        ),
        (
            "adapterLoading: {memory: 1Ki, adapters: [{name: a, source: /a, memory: 600, pinned: true},"
            " {name: b, source: /b, memory: 600, pinned: true}]}",
            "the pinned models need 1200 bytes together, more than the 1Ki of memory; pin fewer",
        ),
        (f"adapterLoading: {{adapters: [{ONE}], timeout: 0s}}", "spec.adapterLoading.timeout: Envoy takes no 0s here"),
        *(
            (f"pathPrefix: {given}", "spec.pathPrefix: ")
            for given in (
                "v1",
                "/",
                "/openai/",
                "'/a b'",
                "/a?b",
                "/a#b",
                "'/a\"'",
                "'/a\n'",
                "https://a.b",
                f"/{'a' * 1024}",
            )
        ),
        (
            f"pathPrefix: /a, pdGroup: {{{ROLES}, leg: Gateway, connector: NixlConnector}}",
            "spec.pathPrefix: is not written where extproc asks prefill engines; leave it, or leg: Gateway, out",
        ),
        (
            f"engine: SGLang, pdGroup: {{{ROLES}, leg: Gateway, connector: NixlConnector}}",
            "spec.pdGroup.connector: bootstrap_room is the connector of engine SGLang, which has no other",
        ),
        (
            f"pdGroup: {{{ROLES}, leg: Gateway, connector: bootstrap_room}}",
            "spec.pdGroup.connector: bootstrap_room is the connector of engine SGLang, which has no other",
        ),
        (
            f"engine: SGLang, pdGroup: {{{ROLES}, leg: Gateway, connector: bootstrap_room, onPrefillFailure: Local}}",
            "spec.pdGroup.onPrefillFailure: a decode engine of SGLang cannot compute prompts; write Fail or leave",
        ),
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
        (f"pdGroup: {{{ROLES}, leg: Gateway, connector: NixlConnector, prefillTimeout: 7s}}", 7.0),
        # the decode engine has it meanwhile
        (f"engine: SGLang, pdGroup: {{{ROLES}, leg: Gateway, connector: bootstrap_room}}", 0.0),
    ],
)
def test_a_request_may_wait_for_its_adapter_and_then_in_the_queue(spec: str, wait_s: float) -> None:
    snapshot = loaded(spec)
    assert sum(snapshot.max_wait_by_field_of(snapshot.servers[0].spec).values()) == wait_s


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("protocol: V2, pdGroup: {prefillLabels: {a: p}, decodeLabels: {a: d}}", "spec.pdGroup"),
        ("protocol: V1, kvEvents: {}", "spec.kvEvents"),
        ("protocol: TensorFlow, cacheIsolation: Shared", "spec.cacheIsolation"),
        ("protocol: V2, modelRewrites: [{targets: [{model: n}]}]", "spec.modelRewrites"),
        ("protocol: V3", "spec.protocol"),
    ],
)
def test_what_is_about_prompts_needs_a_protocol_that_has_some(spec: str, place: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        loaded(spec)
    assert place in str(caught.value)
    assert loaded("protocol: V2, flowControl: {}, picker: RoundRobin").servers


@pytest.mark.parametrize("name", ["..", "."])
def test_a_name_that_is_no_segment_of_a_path_is_refused(name: str) -> None:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: forest}}
spec: {{model: "{name}", protocol: V2, endpoints: []}}
"""
    with pytest.raises(ConfigInvalid, match=r"spec\.model"):
        load_snapshot({"a.yaml": text.encode()})
    assert load_snapshot({"a.yaml": text.replace("V2", "OpenAI").encode()}).servers
