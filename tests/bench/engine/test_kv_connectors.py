# SPDX-License-Identifier: Apache-2.0
"""The JSON of each connector, as its engines and routers write it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bench.engine.kv_connectors import (
    ExportPlan,
    FieldsInvalid,
    ImportPlan,
    Plan,
    TransferConfig,
    TransferFields,
    transfer_plan,
)

ROOM = 5023817734410021773
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[11, 12, 13]],
    "remote_engine_id": "7c0d",
    "remote_request_id": "chatcmpl-1a2b3c4d",
    "remote_host": "10.0.0.11",
    "remote_port": 5600,
    "tp_size": 2,
}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
PUSH = {key: value for key, value in NIXL.items() if key != "remote_block_ids"}
MOONCAKE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "xfer-1",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://10.0.0.11:8998",
}
P2P = {"kv_request_id": "r", "remote_host": "10.0.0.11", "remote_port": 7777}
# what a context server at 10.0.0.11 and port 8998 answers for the request NUMBER
STATE = "WyIxMC4wLjAuMTEiLDg5OTgsIjQzOTgwNDY1MTExMDUiXQ=="
NUMBER = 4398046511105


def plan(connector: str, body: dict[str, Any], role: str = "kv_both") -> Plan:
    config = msgspec.convert({"kv_connector": connector, "kv_role": role}, TransferConfig)
    return transfer_plan(config, msgspec.convert(body, TransferFields), "id-1")


def params(value: dict[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_params": value}


@pytest.mark.parametrize(
    ("connector", "body", "expected"),
    [
        ("NixlConnector", params({**ASKED, "remote_engine_id": None, "remote_block_ids": None}), ExportPlan("id-1")),
        ("NixlConnector", params(NIXL), ImportPlan("chatcmpl-1a2b3c4d", "10.0.0.11", 5600, "7c0d")),
        ("NixlConnector", {}, None),
        ("NixlPushConnector", params(ASKED), ExportPlan("id-1")),
        ("NixlPushConnector", params({**ASKED, "transfer_id": "xfer-1"}), ExportPlan("xfer-1")),
        # it knows the prefill by the id of its own request
        ("NixlPushConnector", params(PUSH), ImportPlan("id-1", "10.0.0.11", 5600, "7c0d")),
        ("MooncakeConnector", params({**ASKED, "transfer_id": "xfer-1"}), ExportPlan("xfer-1")),
        ("MooncakeConnector", params(MOONCAKE), ImportPlan("xfer-1", "10.0.0.11", 8998, "e")),
        ("OffloadingConnector", params({"remote_decoder": {"kv_request_id": "r"}}), ExportPlan("r")),
        ("OffloadingConnector", params({"remote_prefiller": P2P}), ImportPlan("r", "10.0.0.11", 7777)),
        ("ExampleConnector", params(NIXL), None),
        (
            "TensorRT-LLM",
            {"disaggregated_params": {"request_type": "context_only", "disagg_request_id": NUMBER}},
            ExportPlan(str(NUMBER)),
        ),
        (
            "TensorRT-LLM",
            {"disaggregated_params": {"request_type": "generation_only", "encoded_opaque_state": STATE}},
            ImportPlan(str(NUMBER), "10.0.0.11", 8998),
        ),
        ("TensorRT-LLM", {}, None),
    ],
)
def test_the_plan_of_a_request(connector: str, body: dict[str, Any], expected: Plan) -> None:
    assert plan(connector, body) == expected


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
@pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector"])
def test_a_decode_request_with_missing_parameters_is_served_whole(connector: str, missing: str) -> None:
    body = NIXL if connector == "NixlConnector" else {**MOONCAKE, "transfer_id": None}
    assert plan(connector, params({**body, missing: None})) is None


def test_sglang_needs_a_room_and_where_it_is() -> None:
    body = {"bootstrap_host": "10.0.0.21", "bootstrap_port": 8998, "bootstrap_room": ROOM, "rid": "a-1"}
    assert plan("SGLang", body, "kv_producer") == ExportPlan(str(ROOM))
    assert plan("SGLang", body, "kv_consumer") == ImportPlan(str(ROOM), "10.0.0.21", 8998)
    for missing in ("bootstrap_room", "bootstrap_host", "bootstrap_port"):
        with pytest.raises(FieldsInvalid, match="bootstrap"):
            plan("SGLang", {**body, missing: None}, "kv_consumer")


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_type": "context_only"},
        {"request_type": "context_only", "disagg_request_id": 7},
        {"request_type": "context_only", "disagg_request_id": "4398046511105"},
        {"request_type": "generation_only"},
        {"request_type": "generation_only", "encoded_opaque_state": "e30="},
    ],
)
def test_what_tensorrt_llm_cannot_use_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FieldsInvalid):
        plan("TensorRT-LLM", {"disaggregated_params": wrong})
