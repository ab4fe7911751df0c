# SPDX-License-Identifier: Apache-2.0
"""Broken input at random for whoever reads what others send: ``python -m tests.fuzz readers --minutes 10``.

Each input has a reader of ours in this process, and the messages by which it may refuse. Whatever else it raises is
printed with the seed that made it, and the exit status is 1. What a reader keeps between two inputs is kept here, too:
beside the broken ones, an honest source must stay served, and memory must not grow.
"""

from __future__ import annotations

import json
import logging
import math
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

from controller.commands.epp import LaunchContext, plan_launch
from controller.commands.llm_d_picker_flags import FLAGS, FlagInvalid, read_flags
from controller.gateway.compile.file_discovery import DiscoveryInvalid, FilePoolCompiler, parse_file_discovery
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.document_decoder import read_picker_file
from extproc.core.core import Core
from extproc.core.effects import Decision, Fault
from extproc.core.peer_events import EngineReported, UnreadableBatch, decode_events
from extproc.core.request_record import RequestHead
from extproc.engines.dialects import ENGINE_TYPES
from extproc.engines.engine_responses import (
    UnreadableResponse,
    error_message,
    is_unloaded,
    parse_adapters,
    parse_base_model,
    parse_load_response,
    parse_loaded_models,
    parse_model_list,
    parse_repository_index,
)
from extproc.engines.metrics import MetricsReader
from extproc.engines.prometheus_text import MetricsPageRefused
from extproc.feeds.http_get import BadResponse, ResponseParser
from extproc.feeds.saved_limits import SavedLimits
from extproc.feeds.tokenizers import max_tokens_in_payload, parse_tokens
from extproc.llmd.picker_builder import InstalledPluginChecker
from extproc.prefix.kv_event_decoder import UnreadableEvents
from extproc.prefix.kv_index import EventSource, KvIndex, KvStream
from tests.fuzz.loop import Attempt, Attempts, run_inputs
from tests.fuzz.values import JSON_VALUES, MSGPACK_VALUES, broken, spoiled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.core.effects import Effect
    from extproc.engines.dialects import Dialect

_JSON_MARKS: Final = (b"{", b"}", b"[", b"]", b'"', b"\\u", b",", b":", b"1e999", b"NaN", b"-0", b"\xff", b"\0")
_PAGE_MARKS: Final = (
    *(b"\n", b"\r\n", b"#", b"{", b"}", b'"', b"\\", b",", b"=", b" ", b"\t", b"\0", b"\xff", b"NaN", b"+Inf", b"-1"),
    *(b"1e400", b"9" * 400, b"0x10", b'a="' * 200, b"\n" * 500, b"{" * 500, b"vllm:num_requests_running 1\n" * 50),
)
_PACK_MARKS: Final = (
    *(b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2_000),
    *(b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xd9\x03\xff\xfe\xfd", b"\xcf" + b"\xff" * 8, b"\xd3" + b"\x80" + b"\0" * 7),
)
_TEXT_MARKS: Final = (b"\n", b": ", b"- ", b"&a ", b"*a", b"!!int ", b"---\n", b"\t", b"\0", b"\xff", b"{", b"[" * 99)
_SIZE: Final = 4
_HONEST_TOKENS: Final = tuple(range(4 * _SIZE))
_SCRAPED: Final = tuple(ENGINE_TYPES.values())
_JSON: Final[Mapping[str, object]] = {
    "models": {
        "object": "list",
        "data": [
            {"id": "m", "object": "model", "parent": None, "root": "m", "permission": [{"id": "p"}]},
            {"id": "sql", "parent": "m", "root": "/adapters/sql"},
        ],
    },
    "repository": [{"name": "m", "version": "1", "state": "READY"}, {"name": "n", "state": "UNAVAILABLE"}],
    "error": {"error": {"message": "maximum number of adapters", "type": "BadRequestError", "code": 400}},
    "loaded": {"status": "ok", "evicted": ["sql"]},
    "tokens": {"count": 3, "max_model_len": 4096, "tokens": [1, 2, 3]},
    "server_info": {"model_path": "m", "internal_states": [{"load": 1, "memory_usage": {"kvcache": 1.0}}]},
    "loads": [{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 100}],
}
SERVER: Final = "default/llama"
ADDRESS: Final = "10.0.0.1:8000"
_DIRECTORY: Final = b"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints: [{address: "10.0.0.1:8000"}, {address: "10.0.0.2:8000"}]
  scrapeInterval: 1s
  flowControl: {}
  adapterLoading: {slots: 2, timeout: 10s, adapters: [{name: sql, source: /sql}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rateLimits: [{per: Tenant, unit: second, requests: 1000000000, scope: Local}]
  rules: [{targetModels: [{modelServerName: llama}]}]
"""
_CHAT: Final = b'{"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}'
_PICKER: Final[Mapping[str, object]] = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [
        {"type": "queue-scorer"},
        {"type": "max-score-picker"},
        {"type": "prefix-cache-scorer", "parameters": {"blockSize": 16, "maxPrefixBlocksToMatch": 256}},
        {"type": "file-discovery", "name": "files", "parameters": {"path": "endpoints.yaml", "watchFile": True}},
        {"type": "redis-syncer", "parameters": {"address": "127.0.0.1:1", "db": 1}},
        {"type": "metrics-data-source", "parameters": {"scheme": "http", "port": 9000}},
    ],
    "schedulingProfiles": [
        {"name": "default", "plugins": [{"pluginRef": "queue-scorer", "weight": 2}, {"pluginRef": "max-score-picker"}]}
    ],
    "dataLayer": {
        "discovery": {"pluginRef": "files"},
        "sources": [{"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "queue-scorer"}]}],
    },
    "featureGates": ["flowControl"],
    "flowControl": {"maxBytes": "10G", "priorityBands": [{"priority": 1, "maxRequests": 10}]},
    "saturationDetector": {"queueDepthThreshold": 5},
}
_ENDPOINTS: Final[Mapping[str, object]] = {
    "endpoints": [
        {"name": "a", "namespace": "default", "address": "10.0.0.1", "port": "8000", "labels": {"x": "y"}},
        {"name": "b", "address": "fd00::1", "port": 8000},
    ]
}
_WORDS: Final = (
    *(
        "",
        "0",
        "-1",
        "--5",
        "65535",
        "65536",
        "99999999999",
        "²",
        "٣",
        "true",
        "maybe",
        "200ms",
        "5",
        "1h1",
        "a/b",
        "a",
    ),
    *(
        "default",
        "epp",
        "A b",
        "..",
        "/",
        "\0",
        "\n",
        "x" * 300,
        "a=b",
        "a=b,c=d",
        "=",
        ",",
        "8000,8001",
        "https",
        "http",
    ),
    *("vllm:num_requests_waiting", "nv_trt_llm_request_metrics", "inference.networking.k8s.io", "VersionTLS13", "{}"),
    *("TLS_AES_128_GCM_SHA256", "/metrics", "metrics", "info"),
)


class Wrong(AssertionError):
    """A reader has taken what it must not, or has harmed what is beside it; the message says what."""


def _must(holds: object, message: str) -> None:
    if not holds:
        raise Wrong(message)


# KV events


def _stored(number: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [number, number + 1],
        "parent_block_hash": number - 1 if number % 3 else None,
        "token_ids": [number % 7] * (2 * _SIZE),
        "block_size": _SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, ["salt"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def kv_payload(rng: random.Random) -> bytes:
    """A batch of KV events as arrays or maps, mostly with something odd in it."""
    events: list[object] = []
    for _ in range(rng.choice((0, 1, 1, 2, 20))):
        number = rng.randrange(1_000)
        removed = {"type": "BlockRemoved", "block_hashes": [number], "medium": rng.choice((None, "CPU"))}
        event = rng.choice((_stored(number), _stored(number), removed, {"type": "AllBlocksCleared"}, {"type": "New"}))
        events.append(list(event.values()) if rng.random() < 0.4 else event)
    batch: object = [0.0, events, 0] if rng.random() < 0.6 else {"ts": 0.0, "events": events, "data_parallel_rank": 0}
    if rng.random() < 0.7:
        batch = spoiled(batch, rng, MSGPACK_VALUES)
    return _packed(batch, rng)


def _packed(value: object, rng: random.Random) -> bytes:
    content = msgspec.msgpack.encode(value)
    while rng.random() < 0.3:
        content = broken(content, rng, _PACK_MARKS)
    return content


def _kv_events() -> Attempt:
    index = KvIndex()
    honest = KvStream(index, EventSource(0))
    event = {**_stored(0), "block_hashes": [1, 2, 3, 4], "token_ids": list(_HONEST_TOKENS), "extra_keys": None}
    for _ in honest.apply(0, msgspec.msgpack.encode([0.0, [event], 0])):
        pass
    chains = index.block_keys(_HONEST_TOKENS, adapter=None, salt=None)
    streams = [KvStream(index, EventSource(1, rank)) for rank in range(3)]

    def attempt(rng: random.Random) -> bool:
        stream, used = rng.choice(streams), True
        for number in rng.choices((0, 1, 2, 3, 5, 2**62), k=rng.randint(1, 6)):
            payload = kv_payload(rng)
            try:
                _take(stream, number, payload, rng)
            except UnreadableEvents:
                stream.on_disconnect()
                used = False
        while index.drop_cleared_blocks():
            pass
        found = index.match(chains, 0.0)
        _must(any(one.holders & 1 for one in found), "the honest engine's blocks are gone")
        return used

    return attempt


def _take(stream: KvStream, number: int, payload: bytes, rng: random.Random) -> None:
    start = stream.gap_before(number)
    if start is None:
        steps = stream.apply(number, payload)
    elif rng.random() < 0.5:
        steps = stream.apply_replay(start, [(start + count, kv_payload(rng)) for count in range(rng.randint(0, 3))])
    else:
        steps = stream.restart_from(number, payload)
    most = 8 + len(payload)
    for count, _ in enumerate(steps):
        _must(count < max(most, 4 * 8_192), f"{len(payload)} bytes take more than {most} slices")


# engines' pages


def metrics_page(dialect: Dialect) -> bytes:
    """A page with each metric that is read of such an engine."""
    lines = []
    for family, sources in dialect.sources.items():
        for source in sources:
            where = "" if source.where is None else '{}="{}",'.format(*source.where)
            label = f'{{{where}model_name="m"}}'
            lines.append(f"# TYPE {source.name} gauge")
            names = ("_sum", "_count") if "seconds" in family else ("",)
            lines += [f"{source.name}{suffix}{label} 1.5" for suffix in names]
    if dialect.lora_info:
        lines.append(f'{dialect.lora_info}{{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters=""}} 1.7e9')
    if dialect.cache_info:
        lines.append(f'{dialect.cache_info}{{{dialect.block_label}="16",{dialect.blocks_label}="1000"}} 1')
    lines += [f"{name} 16" for name in (dialect.block_size, dialect.blocks) if name]
    return ("\n".join(lines) + "\n").encode()


def broken_page(rng: random.Random) -> bytes:
    """A page of any engine's, broken in some places."""
    page = metrics_page(rng.choice(_SCRAPED))
    for _ in range(rng.choice((0, 1, 1, 3, 8))):
        page = broken(page, rng, _PAGE_MARKS)
    return page


def _metrics_pages() -> Attempt:
    scene = Scene()
    custom = (("own", 'vllm:num_requests_running{model_name="m"}'), ("other", "x"))

    def attempt(rng: random.Random) -> bool:
        reader = MetricsReader(rng.choice(_SCRAPED), custom=custom)
        for _ in range(rng.randint(1, 4)):
            try:
                reading = reader.read(broken_page(rng))
            except MetricsPageRefused:
                return False
            report = reading.report
            numbers = (report.waiting, report.running, report.kv_usage, report.ttft_s, report.tpot_s)
            _must(
                all(one is None or (math.isfinite(one) and one >= 0) for one in numbers), f"{report} has an odd number"
            )
            event = EngineReported(SERVER, ADDRESS, report, reading.cache, reading.has_restarted)
            scene.take(scene.core.on_engine_report(event, scene.now()))
        scene.serve()
        return True

    return attempt


def http_answer(body: bytes, rng: random.Random) -> bytes:
    """An answer to a GET, mostly as it should be."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
    if rng.random() < 0.5:
        answer = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        answer = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    while rng.random() < 0.4:
        at = rng.randint(0, min(len(answer), 150))
        answer = (
            answer[:at] + rng.choice((b"", b"\r\n", b"-1", b"\xff", b";", b" ", b"\0", b"9" * 9)) + answer[at + 1 :]
        )
    return answer


def _http_answers() -> Attempt:
    def attempt(rng: random.Random) -> bool:
        answer = http_answer(broken_page(rng)[:4_000], rng)
        results = []
        # however it is cut, the result is the same
        for pieces in ([answer], _cut(answer, rng)):
            parser, found = ResponseParser(), None
            try:
                for piece in pieces:
                    found = parser.receive(piece)
                    if found is not None:
                        break
            except BadResponse:
                found = b"refused"
            results.append(found)
        _must(results[0] == results[1], "an answer means something else when it comes in pieces")
        return results[0] not in {None, b"refused"}

    return attempt


def _cut(content: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted({rng.randint(0, len(content)) for _ in range(rng.choice((1, 3, 20)))} | {len(content)})
    return [content[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]


# engines' JSON


def broken_json(rng: random.Random, *, of: str = "") -> bytes:
    """An answer of an engine, mostly with something odd in it. ``of``: which one; any by default."""
    value = _JSON[of or rng.choice(list(_JSON))]
    if rng.random() < 0.7:
        value = spoiled(value, rng, JSON_VALUES)
    content = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    while rng.random() < 0.3:
        content = broken(content, rng, _JSON_MARKS)
    return content


def _json_answers() -> Attempt:
    readers: Sequence[Callable[[bytes], object]] = (
        parse_model_list,
        parse_base_model,
        parse_adapters,
        parse_repository_index,
        parse_loaded_models,
    )

    def attempt(rng: random.Random) -> bool:
        body, used = broken_json(rng), False
        for read in readers:
            try:
                read(body)
                used = True
            except UnreadableResponse as refused:
                _must(str(refused).isprintable(), "a refusal would break a line of the log")
        status = rng.choice((0, 199, 200, 204, 400, 404, 409, 500, 503, 999))
        answer = parse_load_response(status, body)
        _must(all(isinstance(one, str) for one in answer.unloaded), "the name of an adapter is no text")
        _must(error_message(body).isprintable(), "a message would break a line of the log")
        return is_unloaded(status, body) or used

    return attempt


def _token_answers() -> Attempt:
    def attempt(rng: random.Random) -> bool:
        most = max_tokens_in_payload(b"x" * rng.choice((0, 10, 1_000)))
        try:
            found = parse_tokens(broken_json(rng, of="tokens"), most)
        except UnreadableResponse:
            return False
        _must(all(0 <= one < 2**32 for one in found), "a token is none")
        return True

    return attempt


# messages of other processes


class Scene:
    """A core with one server, to which others report; ``serve`` has it decide an honest request."""

    def __init__(self) -> None:
        snapshot = load_snapshot({"a.yaml": _DIRECTORY})
        self.core = Core(snapshot, rng=random.Random(0), ticket_prefix="f", machine="here")
        self._now = 0.0

    def now(self) -> float:
        """A time that goes on: a tenth of a second with each call."""
        self._now += 0.1
        return self._now

    def take(self, effects: Sequence[Effect]) -> None:
        """Raises what a request's fault was."""
        for one in effects:
            if isinstance(one, Fault):
                raise one.error

    def serve(self) -> None:
        """Raises Wrong unless an honest request goes to an engine."""
        head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
        arrival = self.core.builder.build_by_model(head, _CHAT)
        own, effects = self.core.arrive(arrival, self.now())
        self.take(effects)
        sent = isinstance(own, Decision) or any(
            isinstance(one, Decision) and one.ticket == own.ticket for one in self.core.tick(self.now())
        )
        self.take(self.core.on_stream_closed(own.ticket, self.now()))
        _must(sent, f"an honest request is not sent: {own}")


def _peer_values() -> dict[str, list[object]]:
    limit = {"rate": 1.0, "capacity": 10.0}
    outcome = dict(ticket="p-1", status=200, served=ADDRESS, duration_s=1.0, ttfb_s=0.1)  # noqa: C408 - a line
    outcome |= {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 0}
    report = {"waiting": 1.0, "running": 2.0, "kv_usage": 0.5, "ttft_s": 0.1, "tpot_s": 0.01, "first_tokens": 3.0}
    loras = {"active": ["sql"], "waiting": [], "max_active": 2, "served": ["m", "sql"], "base": ["m"]}
    started: list[object] = ["s", "p-1", SERVER, ADDRESS, None, [1, 2], [0, 0], 300, False]
    started += [100.0, 0.0, 0.0, 0.0, 0.5, 5.0, None, 0, 0.0, 1, "sql", [["session", ADDRESS, 60.0]], "t"]
    return {
        "started": started,
        "ended": ["e", "p-1"],
        "outcome": ["l", outcome],
        "reported": ["r", SERVER, ADDRESS, {**report, "loras": loras}, {"block_tokens": 16, "total_tokens": 1000}],
        "alive": ["a", ["p-1"]],
        "spent": ["b", "here", "key", limit, 1.0],
        "asks": ["q", "here"],
        "levels": ["v", "f", [["key", limit, 1.0]]],
        "adapter": ["d", SERVER, ADDRESS, "sql", "loaded"],
    }


def peer_payload(rng: random.Random) -> bytes:
    """A batch of another process's events, mostly with something odd in it."""
    events = list(rng.choices(list(_peer_values().values()), k=rng.randint(0, 4)))
    batch: object = [f"origin-{rng.randrange(5)}", events, rng.randrange(1, 10**6)]
    if rng.random() < 0.8:
        batch = spoiled(batch, rng, MSGPACK_VALUES, most=2)
    return _packed(batch, rng) if rng.random() < 0.5 else msgspec.msgpack.encode(batch)


def _peer_messages() -> Attempt:
    scene = Scene()

    def attempt(rng: random.Random) -> bool:
        try:
            batch = decode_events(peer_payload(rng))
        except UnreadableBatch as refused:
            _must(str(refused).isprintable(), "a refusal would break a line of the log")
            return False
        scene.take(scene.core.apply_peer_batch(batch, scene.now()))
        scene.take(scene.core.heartbeat(scene.now()))
        scene.serve()
        return True

    return attempt


# files that processes leave or others write


def _state_files() -> Attempt:
    saved = {"saved_at_s": 1e9, "levels": [["key", {"rate": 1.0, "capacity": 10.0}, -1.0]]}

    def attempt(rng: random.Random) -> bool:
        value = spoiled(saved, rng, JSON_VALUES) if rng.random() < 0.8 else saved
        content = json.dumps(value).encode("utf-8", "surrogatepass")
        while rng.random() < 0.3:
            content = broken(content, rng, _JSON_MARKS)
        scene = Scene()
        limits = scene.core.admission.limits
        with tempfile.TemporaryDirectory(prefix="attache-fuzz-") as folder:
            (Path(folder) / "limits-0.json").write_bytes(content)
            SavedLimits(limits, Path(folder), number=1, clock=scene.now, wall_clock=lambda: 1e9).load()
        # of the file; an honest request has a bucket of its own
        used = bool(limits.bucket_count)
        scene.serve()
        levels = [one.level for one in limits.levels(scene.now())]
        _must(all(math.isfinite(one) for one in levels), f"levels {levels}")
        return used

    return attempt


def _text(value: object, rng: random.Random) -> str:
    if rng.random() < 0.8:
        value = spoiled(value, rng, JSON_VALUES)
    content = json.dumps(value).encode() if rng.random() < 0.3 else yaml.safe_dump(value, allow_unicode=True).encode()
    while rng.random() < 0.3:
        content = broken(content, rng, _TEXT_MARKS)
    return content.decode(errors="replace")


def _discovered_pools() -> Attempt:
    """A pool without a cluster: its EndpointPickerConfig and its file of endpoints, which are changed in turn."""
    compiler = FilePoolCompiler("default/epp", {"scrapeInterval": "200ms"}, check_picker=InstalledPluginChecker())
    served = False

    def attempt(rng: random.Random) -> bool:
        nonlocal served
        config, endpoints = _text(_PICKER, rng), _text(_ENDPOINTS, rng)
        try:
            found = parse_file_discovery(read_picker_file("picker.yaml", config).config)
        except (ConfigInvalid, DiscoveryInvalid):
            found = None
        compiler.put_config(config)
        compiler.put_endpoints("endpoints.yaml", endpoints)
        result = compiler.compile()
        if result.files is not None:
            load_snapshot(result.files)
        _must(result.files is not None or not served, f"what was served is gone: {result.problems}")
        served = result.files is not None
        return found is not None

    return attempt


def _flags() -> Attempt:
    def attempt(rng: random.Random) -> bool:
        words = ["--pool-name=epp"] if rng.random() < 0.7 else []
        for flag in rng.choices(FLAGS, k=rng.choice((0, 1, 1, 2, 5))):
            dashes = rng.choice(("--", "--", "-"))
            pair = [f"{dashes}{flag.name}", rng.choice((*_WORDS, flag.default, flag.harmless))]
            words += pair if rng.random() < 0.3 else ["=".join(pair)]
        rng.shuffle(words)
        context = LaunchContext(
            namespace=rng.choice(("", "default")), address="127.0.0.1", has_cluster=rng.random() < 0.5
        )
        try:
            planned = plan_launch(read_flags(words), context)
        except FlagInvalid:
            return False
        namespace, mark, name = planned.pool.partition("/")
        _must(namespace and name and mark and "/" not in name, f"the pool is {planned.pool!r}")
        _must(0 < int(planned.metrics.rpartition(":")[2]) < 65536, f"metrics at {planned.metrics!r}")
        if not context.has_cluster:
            FilePoolCompiler(planned.pool, planned.server_fields, check_picker=InstalledPluginChecker()).compile()
        return True

    return attempt


INPUTS: Final[Attempts] = {
    "KV events": _kv_events,
    "metrics pages": _metrics_pages,
    "HTTP answers": _http_answers,
    "JSON answers": _json_answers,
    "token answers": _token_answers,
    "messages of processes": _peer_messages,
    "state files": _state_files,
    "discovery files": _discovered_pools,
    "flags of epp": _flags,
}


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if something was wrong."""
    # what cannot be read is logged
    logging.disable(logging.ERROR)
    return run_inputs("python -m tests.fuzz readers", __doc__ or "", INPUTS, words)
