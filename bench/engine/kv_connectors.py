# SPDX-License-Identifier: Apache-2.0
"""How requests ask engines to prefill for each other: the JSON of each connector, without I/O.

A plan says what a request is: a prefill to be kept under a key (``ExportPlan``), a decode of what another engine keeps
under a key (``ImportPlan``), or None: the engine serves it whole. A decode request whose parameters are not complete is
served whole, without a word, as vLLM does it; its metrics show that the prompt was computed.

| connector | prefill engine | decode engine |
|---|---|---|
| `NixlConnector` | answers parameters | reads them; what expired is garbage |
| `NixlPushConnector` | the id of the request's header; answers parameters | the same id; reads them; waits |
| `MooncakeConnector` | `transfer_id` | the same, and the engine id that `/query` answers; waits |
| `OffloadingConnector` | `remote_decoder` | `remote_prefiller`; what is gone is computed |
| `SGLang` | `bootstrap_room`; computes when the other has come | the same; waits |
| `TensorRT-LLM` | `disaggregated_params` `context_only` | those of the answer |
| shared stores | no parameters: `SHARED_STORES` | no parameters |

Sources: vLLM 0.32 (``distributed/kv_transfer/kv_connector/v1``), SGLang 0.5.23 (``disaggregation``), TensorRT-LLM
(``serve/openai_disagg_service.py``).
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from bench.engine.fake_tokenizer import tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.engine.request import Request

Connector = Literal[
    "NixlConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "OffloadingConnector",
    "ExampleConnector",
    "LMCacheConnectorV1",
    "MooncakeStoreConnector",
    "HF3FSKVConnector",
    "FlexKVConnectorV1",
    "SGLang",
    "TensorRT-LLM",
]
SHARED_STORES: Final = frozenset(
    {"ExampleConnector", "LMCacheConnectorV1", "MooncakeStoreConnector", "HF3FSKVConnector", "FlexKVConnectorV1"}
)
# Engine seconds that a decode engine waits for the prefill, where it may come first.
WAIT_S: Final[Mapping[str, float]] = {"NixlPushConnector": 30.0, "MooncakeConnector": 480.0, "SGLang": 300.0}
# Leases other than NIXL's 30 s; a store's copy is nobody's to pin.
_LEASES_S: Final[Mapping[str, float]] = {"MooncakeConnector": 480.0, "OffloadingConnector": 60.0, "SGLang": 300.0}


class ConnectorExtraConfig(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config``."""

    kv_lease_duration: float | None = None
    shared_storage_path: str = "/tmp"  # noqa: S108 - vLLM's default


class TransferConfig(msgspec.Struct, frozen=True):
    """``--kv-transfer-config``, with the names of vLLM. SGLang and TensorRT-LLM are connectors here, too."""

    kv_connector: Connector
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    engine_id: str = ""
    kv_connector_extra_config: ConnectorExtraConfig = ConnectorExtraConfig()

    @property
    def lease_s(self) -> float | None:
        """How long blocks stay pinned, in engine seconds; None: NIXL's default."""
        return self.kv_connector_extra_config.kv_lease_duration or _LEASES_S.get(self.kv_connector)


class TransferFields(msgspec.Struct, frozen=True):
    """The fields of a body by which a router makes pairs."""

    kv_transfer_params: dict[str, Any] | None = None
    disaggregated_params: dict[str, Any] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    bootstrap_room: int | list[int] | None = None
    rid: str | list[str] = ""
    # of the responses API
    request_id: str = ""

    @property
    def sglang_request_ids(self) -> list[str]:
        """SGLang's, of each prompt."""
        return self.rid if isinstance(self.rid, list) else [self.rid or self.request_id]


class ExportPlan(msgspec.Struct, frozen=True):
    """Prefill, and keep it for who asks for ``key``."""

    key: str


class ImportPlan(msgspec.Struct, frozen=True):
    """Decode what the engine at ``host`` and ``port``, its side channel, keeps under ``key``.

    ``engine_id``: that engine's, if the request names it.
    """

    key: str
    host: str
    port: int
    engine_id: str = ""


Plan = ExportPlan | ImportPlan | None


class FieldsInvalid(msgspec.ValidationError):
    """The engine answers 400."""


def prompt_transfer_plans(config: TransferConfig, fields: TransferFields, request_id: str) -> list[Plan]:
    """Of each prompt, where each has a room of SGLang's; else of the request. Raises as ``transfer_plan``."""
    rooms, hosts, ports = fields.bootstrap_room, fields.bootstrap_host, fields.bootstrap_port
    if config.kv_connector != "SGLang" or not isinstance(rooms, list):
        return [transfer_plan(config, fields, request_id)]
    if not isinstance(hosts, list) or not isinstance(ports, list) or not len(rooms) == len(hosts) == len(ports):
        msg = "bootstrap_host, bootstrap_port and bootstrap_room are lists of one length, or none of them is."
        raise FieldsInvalid(msg)
    return [
        transfer_plan(config, TransferFields(bootstrap_host=host, bootstrap_port=port, bootstrap_room=room), request_id)
        for host, port, room in zip(hosts, ports, rooms, strict=True)
    ]


def transfer_plan(config: TransferConfig, fields: TransferFields, request_id: str) -> Plan:
    """What a request is. Raises FieldsInvalid. ``request_id``: its header x-request-id, or what is made of it."""
    connector, params = config.kv_connector, fields.kv_transfer_params or {}
    if connector in SHARED_STORES:
        return None
    if connector == "SGLang":
        return _sglang_plan(config, fields)
    if connector == "TensorRT-LLM":
        return _tensorrt_plan(fields.disaggregated_params or {})
    if connector == "OffloadingConnector":
        return _offloading_plan(params)
    return _vllm_plan(connector, params, request_id)


def _vllm_plan(connector: Connector, params: Mapping[str, Any], request_id: str) -> Plan:
    """Of NIXL, pull and push, and Mooncake. A decode request that lacks a parameter has no plan."""
    transfer_id = str(params.get("transfer_id") or "")
    if params.get("do_remote_decode"):
        key = {"NixlConnector": request_id, "MooncakeConnector": transfer_id}.get(connector, transfer_id or request_id)
        return ExportPlan(key) if key else None
    host, port = params.get("remote_host"), params.get("remote_port")
    key = str(params.get("remote_request_id") or "")
    if connector == "MooncakeConnector":
        url = urlsplit(str(params.get("remote_bootstrap_addr") or ""))
        host, port, key = url.hostname, url.port, transfer_id
    elif connector == "NixlPushConnector":
        key = transfer_id or request_id
    elif not params.get("remote_block_ids"):
        return None
    engine_id, is_decode = params.get("remote_engine_id"), params.get("do_remote_prefill")
    if not (is_decode and key and isinstance(engine_id, str) and isinstance(host, str) and isinstance(port, int)):
        return None
    return ImportPlan(key, host, port, engine_id)


def _sglang_plan(config: TransferConfig, fields: TransferFields) -> Plan:
    room, host, port = fields.bootstrap_room, fields.bootstrap_host, fields.bootstrap_port
    if room is None:
        msg = "Disaggregated request received without bootstrap room id."
        raise FieldsInvalid(msg)
    if config.kv_role == "kv_producer":
        return ExportPlan(str(room))
    if not isinstance(host, str) or not isinstance(port, int):
        msg = "bootstrap_host and bootstrap_port are required with bootstrap_room."
        raise FieldsInvalid(msg)
    return ImportPlan(str(room), host, port)


def _tensorrt_plan(params: Mapping[str, Any]) -> Plan:
    kind, number = params.get("request_type"), params.get("disagg_request_id")
    if kind == "context_only":
        if not isinstance(number, int) or not 2**42 <= number < 2**63:
            msg = "disagg_request_id must be an integer of 2^42 or more."
            raise FieldsInvalid(msg)
        return ExportPlan(str(number))
    if kind != "generation_only":
        return None
    try:
        host, port, key = msgspec.json.decode(
            base64.b64decode(str(params.get("encoded_opaque_state")), validate=True), type=tuple[str, int, str]
        )
    except (ValueError, msgspec.DecodeError):
        msg = "encoded_opaque_state is not what a context server answered."
        raise FieldsInvalid(msg) from None
    return ImportPlan(key, host, port)


def _offloading_plan(params: Mapping[str, Any]) -> Plan:
    for name in ("remote_decoder", "remote_prefiller"):
        one = params.get(name)
        key = one.get("kv_request_id") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(key, str):
            continue
        if name == "remote_decoder":
            return ExportPlan(key)
        host, port = one.get("remote_host"), one.get("remote_port")
        if isinstance(host, str) and isinstance(port, int):
            return ImportPlan(key, host, port)
    return None


def transfer_response_fields(
    config: TransferConfig,
    export: ExportPlan,
    request: Request,
    blocks: Sequence[int],
    *,
    engine_id: str,
    address: tuple[str, int],
) -> dict[str, Any]:
    """The fields that a prefill engine adds to its answer. ``address``: of its side channel. ``blocks``: pinned."""
    host, port = address
    if config.kv_connector in {"NixlConnector", "NixlPushConnector"}:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(blocks)],
            "remote_engine_id": engine_id,
            "remote_request_id": export.key,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "push" if config.kv_connector == "NixlPushConnector" else "pull",
            "remote_prefill_cached_tokens": request.cached_tokens or 0,
        }
        return {"kv_transfer_params": params}
    return {}


def trtllm_context_response_fields(
    export: ExportPlan, request: Request, prompt: bytes, *, address: tuple[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a TensorRT-LLM context server: the fields that its answer has more, and those of its first choice."""
    state = base64.b64encode(msgspec.json.encode((*address, export.key))).decode()
    params = {
        "request_type": "context_only",
        "ctx_request_id": request.key,
        "first_gen_tokens": tokens_of(request.answer[:4]),
        "encoded_opaque_state": state,
        "disagg_request_id": int(export.key),
    }
    return {"prompt_token_ids": tokens_of(prompt)}, {"disaggregated_params": params}
