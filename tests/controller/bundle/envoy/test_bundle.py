# SPDX-License-Identifier: Apache-2.0
"""What a build is spared by the one before it, and that it comes to the same."""

from __future__ import annotations

from envoy_data_plane.envoy.config.endpoint.v3 import Endpoint, LbEndpoint

from controller.bundle.envoy import clusters
from controller.bundle.envoy.bundle import BundleWriter, build_bundle
from controller.bundle.envoy.envoy_json import BuildMemo, envoy_address, to_plain
from extproc.api.config_loader import SnapshotLoader

DOCUMENTS = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: one}
spec: {model: m, endpoints: [{address: "10.0.0.1:8000"}, {address: "[fd00::2]:8000"}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: two}
spec: {model: n, endpoints: []}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules: [{targetModels: [{modelServerName: one}, {modelServerName: two, weight: 0}]}]
"""


def test_what_is_asked_for_again_is_made_once_and_what_is_not_is_forgotten() -> None:
    memo, made = BuildMemo(), []

    def make(*given: object) -> int:
        made.append(given)
        return len(made)

    one, equal = [1], [1]
    assert [memo.get(make, one), memo.get(make, one), memo.get(make, equal)] == [1, 1, 2]
    assert memo.get(make, one, 0.5) == memo.get(make, one, 1 / 2) == 3
    memo.start_build()
    assert memo.get(make, one) == 1
    memo.start_build()
    assert [memo.get(make, one), memo.get(make, equal)] == [1, 4]


def test_bundles_by_a_writer_that_knows_earlier_ones_are_the_same() -> None:
    loader, writer = SnapshotLoader(), BundleWriter("/x")
    for old, new in [
        ("", ""),
        ("10.0.0.1", "10.0.0.9"),
        ("weight: 0", "weight: 5"),
        ("model: m", "model: o"),
        ("modelName: chat", "modelName: talk"),
        ("model: n,", "model: n, trafficPolicy: {timeout: 5m},"),
    ]:
        snapshot = loader.load({"all.yaml": DOCUMENTS.replace(old, new, 1).encode()})
        assert writer.build(snapshot) == build_bundle(snapshot, "/x")


def test_endpoints_are_what_envoys_schema_would_write() -> None:
    for text in ("10.0.0.1:8000", "[fd00::2]:65535"):
        assert clusters.endpoint_json(text) == to_plain(LbEndpoint(endpoint=Endpoint(address=envoy_address(text))))


def test_a_change_of_endpoints_alone_writes_anew_the_files_of_their_server_and_nothing_else() -> None:
    loader, writer = SnapshotLoader(), BundleWriter("/x")
    before = writer.build(loader.load({"all.yaml": DOCUMENTS.encode()}))
    fresh = loader.load({"all.yaml": DOCUMENTS.replace("10.0.0.1", "10.0.0.9").encode()})
    after = writer.build(fresh)
    changed = {name for name, text in after.items() if text is not before[name]}
    assert changed == {clusters.endpoints_file(next(one for one in fresh.servers if one.metadata.key == "default/one"))}
