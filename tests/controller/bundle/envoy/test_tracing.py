# SPDX-License-Identifier: Apache-2.0
"""Tracing in bundles: who may continue a trace, and how Envoy reaches the collector."""

from __future__ import annotations

import json
from typing import Any

from controller.bundle.envoy.bundle import build_bundle
from extproc.api.config_loader import load_snapshot


def bundle(spec: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The connection manager, and the clusters."""
    text = f"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {{name: g}}\nspec: {spec}\n"
    files = build_bundle(load_snapshot({"a.yaml": text.encode()}), "/x")
    listener = json.loads(files["lds.json"])["resources"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager, json.loads(files["cds.json"])["resources"]


def removed(manager: dict[str, Any]) -> set[str]:
    """Names and prefixes of headers that are removed first."""
    mutations = manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
    return {one.get("remove") or one["remove_on_match"]["key_matcher"]["prefix"] for one in mutations}


def test_without_tracing_nothing_of_it_is_there() -> None:
    manager, clusters = bundle("{}")
    assert not {"tracing", "request_id_extension"} & manager.keys()
    assert "traceparent" not in removed(manager)
    assert [one["name"] for one in clusters] == ["attache-extproc"]


def test_only_trusted_clients_bring_a_decision_about_sampling() -> None:
    tracing = "tracing: {endpoint: '10.0.0.1:4317', samplingPercent: 0.05}"
    manager, _ = bundle(f"{{{tracing}}}")
    sampler = manager["tracing"]["provider"]["typed_config"]["sampler"]
    share = {"numerator": 500, "denominator": "MILLION"}
    assert sampler["typed_config"]["sampling_percentage"] == share
    assert {"traceparent", "tracestate", "baggage", "b3", "x-b3-", "x-client-trace-id", "x-envoy-"} <= removed(manager)
    manager, _ = bundle(f"{{clients: Trusted, {tracing}}}")
    sampler = manager["tracing"]["provider"]["typed_config"]["sampler"]
    assert sampler["name"].endswith("parent_based")
    assert sampler["typed_config"]["wrapped_sampler"]["typed_config"]["sampling_percentage"] == share
    assert "traceparent" not in removed(manager)
    assert "x-envoy-" in removed(manager)


def test_a_collector_with_tls_must_show_a_certificate_for_its_name() -> None:
    tls = "tls: {caFile: /ca.pem}"
    manager, clusters = bundle(f"{{tracing: {{endpoint: 'otel.example:4318', protocol: http, {tls}}}}}")
    uri = manager["tracing"]["provider"]["typed_config"]["http_service"]["http_uri"]
    assert (uri["uri"], uri["cluster"]) == ("https://otel.example:4318/v1/traces", "attache-collector")
    cluster = clusters[-1]
    assert (cluster["name"], cluster["type"]) == ("attache-collector", "STRICT_DNS")
    context = cluster["transport_socket"]["typed_config"]
    checks = context["common_tls_context"]["validation_context"]
    assert (context["sni"], checks["trusted_ca"]) == ("otel.example", {"filename": "/ca.pem"})
    assert checks["match_typed_subject_alt_names"][0]["matcher"] == {"exact": "otel.example"}


def test_exports_that_a_collector_does_not_answer_are_bounded() -> None:
    manager, clusters = bundle("{tracing: {endpoint: '10.0.0.1:4317'}}")
    config = manager["tracing"]["provider"]["typed_config"]
    assert config["grpc_service"]["timeout"] == "2s"
    assert config["max_cache_size"] == 1024
    bounds = clusters[-1]["circuit_breakers"]["thresholds"][0]
    assert (bounds["max_requests"], bounds["max_pending_requests"], bounds["max_connections"]) == (64, 64, 4)
