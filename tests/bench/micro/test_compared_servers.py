# SPDX-License-Identifier: Apache-2.0
"""The measured Envoys have the routes that the measurement needs."""

import json
from pathlib import Path

import pytest

from bench.micro.baseline_servers import SERVER
from bench.micro.compared_servers import ANSWER_BY_ENVOY, bundle_files
from bench.stack.loopback_stack import documents


@pytest.mark.parametrize("in_pieces", [False, True])
def test_envoy_answers_marked_requests_and_sends_others_to_the_server(in_pieces: bool) -> None:
    text = documents(["127.0.0.1:8000"], gateway={"listen": "127.0.0.1:80"})
    files = bundle_files(text, Path("/bundle"), in_pieces=in_pieces)
    (host,) = (one for one in json.loads(files["rds.json"])["resources"][0]["virtual_hosts"] if one["domains"] == ["*"])
    marked, *others = host["routes"]
    assert marked["match"]["headers"][0]["name"] == ANSWER_BY_ENVOY
    decided = next(one["route"] for one in others if "route" in one)
    assert (decided.get("cluster"), "cluster_header" in decided) == ((SERVER, False) if in_pieces else (None, True))
    assert ("FULL_DUPLEX_STREAMED" in files["lds.json"]) == in_pieces
    assert SERVER in {one["name"] for one in json.loads(files["cds.json"])["resources"]}


@pytest.mark.parametrize(("asks", "names"), [(True, ["ext_proc", "router"]), (False, ["router"])])
def test_a_gateway_of_others_has_no_other_filter_of_ours(asks: bool, names: list[str]) -> None:
    text = documents(["127.0.0.1:8000"], gateway={"listen": "127.0.0.1:80"})
    files = bundle_files(text, Path("/bundle"), in_pieces=True, asks=asks)
    (listener,) = json.loads(files["lds.json"])["resources"]
    (chain,) = listener["filter_chains"]
    filters = chain["filters"][0]["typed_config"]["http_filters"]
    assert [one["name"].rpartition(".")[2] for one in filters] == names
    assert "health_checks" not in files["cds.json"], "llm-d's picker has its health service on another port"


@pytest.mark.parametrize(("protocol", "is_unread"), [("V2", True), ("V2-gRPC", False)])
def test_marked_requests_are_read_as_those_of_their_protocol(protocol: str, is_unread: bool) -> None:
    more = {"protocol": protocol, "model": "m"}
    text = documents(["127.0.0.1:8000"], gateway={"listen": "127.0.0.1:80", "failureMode": "Open"}, more=more)
    files = bundle_files(text, Path("/bundle"), in_pieces=False)
    (host,) = (one for one in json.loads(files["rds.json"])["resources"][0]["virtual_hosts"] if one["domains"] == ["*"])
    marked, *others = host["routes"]
    by_protocol = next(one for one in others if one.get("name", "").startswith(("by-path", "by-call")))
    assert marked["typed_per_filter_config"] == by_protocol["typed_per_filter_config"]
    # a mode of its own, without bodies
    assert ("processing_mode" in str(marked["typed_per_filter_config"])) == is_unread
