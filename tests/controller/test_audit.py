# SPDX-License-Identifier: Apache-2.0
"""The audit log: a line for each write, with its cause, without secrets, in bounded space."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from bench.stack.loopback_stack import documents
from controller.audit import (
    AuditedObject,
    AuditLog,
    add_audit_option,
    caused_by,
    file_recorder,
    object_place_from_path,
    open_audit,
)
from controller.bundle.sync import BundleSync
from controller.gateway.directory_writer import DirectoryWriter
from extproc.api.config_loader import ConfigDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

DEPLOYMENT = "/apis/apps/v1/namespaces/team/deployments/llama"


def entries(folder: Path, write: Callable[[AuditLog], None]) -> list[dict[str, Any]]:
    """The lines that ``write`` causes."""
    file = folder / "audit.log"
    with open_audit(str(file), CollectorRegistry()) as audit:
        assert audit is not None
        write(audit)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_write_is_a_line_with_who_what_and_why(tmp_path: Path) -> None:
    def write(audit: AuditLog) -> None:
        answer = {"metadata": {"name": "llama", "uid": "u", "resourceVersion": "7"}}
        with (
            caused_by(of="AutoscalingPolicyBinding team/one"),
            caused_by(reason="2.5 requests wait", old={"replicas": 2}, new={"replicas": 5}),
        ):
            body = {"spec": {"replicas": 5}}
            audit.record_write("scaler", "PATCH", DEPLOYMENT + "/scale", body=body, answer=answer)

    (entry,) = entries(tmp_path, write)
    assert entry.pop("time").endswith("Z")
    assert entry.pop("host")
    assert entry == {
        "actor": "scaler",
        "verb": "patch",
        "outcome": "ok",
        "objectRef": {
            "apiVersion": "apps/v1",
            "resource": "deployments",
            "namespace": "team",
            "name": "llama",
            "subresource": "scale",
            "uid": "u",
            "resourceVersion": "7",
        },
        "cause": {
            "of": "AutoscalingPolicyBinding team/one",
            "reason": "2.5 requests wait",
            "old": {"replicas": 2},
            "new": {"replicas": 5},
        },
        "change": {"spec": {"replicas": 5}},
    }


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (DEPLOYMENT, AuditedObject("apps/v1", "deployments", "team", "llama")),
        ("/api/v1/namespaces/team/pods", AuditedObject("v1", "pods", "team")),
        ("/api/v1/namespaces/team/pods/a/eviction", AuditedObject("v1", "pods", "team", "a", "eviction")),
        ("/api/v1/nodes/n%2F1", AuditedObject("v1", "nodes", "", "n/1")),
        ("/api/v1/namespaces/team", AuditedObject("v1", "namespaces", "", "team")),
        ("/apis/a.dev/v1/models", AuditedObject("a.dev/v1", "models")),
    ],
)
def test_a_path_names_an_object(path: str, place: AuditedObject) -> None:
    assert object_place_from_path(path) == place


def test_secrets_and_values_of_environment_variables_are_not_written(tmp_path: Path) -> None:
    def write(audit: AuditLog) -> None:
        secret = {"metadata": {"name": "s"}, "data": {"key": "canary"}, "stringData": {"key": "canary"}}
        audit.record_write("a", "POST", "/api/v1/namespaces/n/secrets", body=secret, answer=None)
        container = {"name": "engine", "env": [{"name": "TOKEN", "value": "canary"}, {"name": "X", "valueFrom": {}}]}
        pod = {"metadata": {"name": "p"}, "spec": {"containers": [container]}}
        audit.record_write("a", "POST", "/api/v1/namespaces/n/pods", body=pod, answer=None)

    secret, pod = entries(tmp_path, write)
    assert "canary" not in (tmp_path / "audit.log").read_text()
    assert secret["change"]["data"] == "***"
    assert pod["change"]["spec"]["containers"][0]["env"][0] == {"name": "TOKEN", "value": "***"}


def test_long_changes_are_digests_and_what_changes_nothing_is_left_out(tmp_path: Path) -> None:
    def write(audit: AuditLog) -> None:
        for plural in ("leases", "events", "subjectaccessreviews"):
            audit.record_write("a", "POST", f"/apis/x/v1/namespaces/n/{plural}", body={}, answer=None)
        body = {"spec": {"text": "x" * 100_000}}
        with caused_by(message="m" * 100_000):
            audit.record_write("a", "PUT", DEPLOYMENT, body=body, answer=None, outcome="409 Conflict\nforged")

    (entry,) = entries(tmp_path, write)
    assert entry["change"]["bytes"] == 100_020
    assert len(entry["cause"]["message"]) == 2_048
    assert entry["outcome"] == "409 Conflict\nforged"


def test_files_of_a_directory_are_entries(tmp_path: Path) -> None:
    def write(audit: AuditLog) -> None:
        writer = DirectoryWriter(tmp_path / "config", file_recorder(audit, "gateway"))
        with caused_by(reason="objects have changed"):
            writer.write({"gateway.json": b"1", "modelroute.a.json": b"2"})
            writer.write({"gateway.json": b"1"})

    found = entries(tmp_path, write)
    assert [(one["verb"], Path(one["file"]).name) for one in found] == [
        ("write", "gateway.json"),
        ("write", "modelroute.a.json"),
        ("delete", "modelroute.a.json"),
    ]
    assert {one["cause"]["reason"] for one in found} == {"objects have changed"}
    assert found[0]["sha256"] == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"


def test_files_of_a_bundle_are_entries_with_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway={}))

    def write(audit: AuditLog) -> None:
        sync = BundleSync(ConfigDirectory(config), tmp_path / "out", "/x", None, file_recorder(audit, "bundle"))
        sync.write_first_bundle(lambda: 0.0)
        sync.sync_once(lambda: 1.0)

    found = entries(tmp_path, write)
    written = {str(one.relative_to(tmp_path / "out")) for one in (tmp_path / "out").rglob("*.json")}
    assert {str(Path(one["file"]).relative_to(tmp_path / "out")) for one in found} == written
    assert len(found) == len(written)
    assert all(one["cause"]["reason"].startswith("configuration ") for one in found)


def test_a_log_that_cannot_be_written_stops_nothing_and_is_counted() -> None:
    registry = CollectorRegistry()
    with open_audit("/dev/full", registry) as audit:
        assert audit is not None
        audit.record_write("a", "PUT", DEPLOYMENT, body={}, answer=None)
        audit.record_write("a", "PUT", DEPLOYMENT, body={"spec": {"replicas": {1, 2}.__iter__()}}, answer=None)
    assert registry.get_sample_value("attache_audit_entries_total", {"result": "failed"}) == 2
    assert registry.get_sample_value("attache_audit_entries_total", {"result": "written"}) == 0


def test_without_the_option_there_is_none() -> None:
    made = argparse.ArgumentParser()
    add_audit_option(made)
    with open_audit(made.parse_args([]).audit_log, CollectorRegistry()) as audit:
        assert audit is None
