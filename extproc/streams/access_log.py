# SPDX-License-Identifier: Apache-2.0
"""Envoy's access log entries to outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.charged_tokens import CUTS, TIME_LIMITS, TIMEOUT_DETAILS
from extproc.api.usage_log import UsageContext
from extproc.core.effects import OutcomeJoined
from extproc.core.orphaned_request_charges import OrphanedOutcome
from extproc.core.request_record import Outcome
from extproc.streams.headers import is_encoded, read_retry_after
from extproc.streams.usage_reader import MOST_REPORTED
from extproc.wire_names import (
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    CONTENT_ENCODING,
    CREATED_TOKENS,
    DESTINATION,
    ERRORS,
    EVENTS,
    FIRST_CONTENT_US,
    GRPC_STATUS,
    LB_NAMESPACE,
    NAMESPACE,
    PAUSES_NAMESPACE,
    PROMPT_TOKENS,
    REASONING_TOKENS,
    REFUSED,
    RETRY_AFTER,
    ROUTE_NAMESPACE,
    SERVED_HOST,
    SERVED_NAMESPACE,
    SERVER_CLUSTER,
    TICKET,
    TRANSLATED_ATTEMPTS,
    TRANSLATED_CUT,
    TRANSLATED_DETAILS,
    TRANSLATED_NAMESPACE,
    TRANSLATOR_CLUSTER,
    TTFT_TAG,
    USAGE_CONTEXT,
    USAGE_NAMESPACE,
    http_status,
)

if TYPE_CHECKING:
    from extproc.streams.messages import (
        AccessLogCommon,
        Duration,
        HttpAccessLogEntry,
        HttpResponseProperties,
        StreamAccessLogsMessage,
        Struct,
    )
    from extproc.streams.stream_dependencies import StreamContext
    from extproc.task_supervisor import FailureLog


# Of the time until the first byte, in microseconds.
_MOST_DIGITS: Final = 15
_OK: Final = 200
_MOST_STATUS_DIGITS: Final = 3
_TIME_LIMITS: Final = frozenset(TIME_LIMITS.values())
# Such a call has a ``grpc-timeout``, which its client writes.
_OWN_LIMIT: Final = TIME_LIMITS["DT"]
_CUTS: Final = frozenset(CUTS.values())
_ENGINE_CUTS: Final = frozenset({"upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error"})
# Envoy's word for an answer that is not its own.
_BY_ENGINE: Final = "via_upstream"
_contexts: Final = msgspec.json.Decoder(UsageContext)


def receive_entries(message: StreamAccessLogsMessage, context: StreamContext, now: float, failures: FailureLog) -> None:
    """Settle every entry of a batch. Entries without a ticket (refusals, requests balanced without extproc) are
    skipped.

    Envoy sends its log to one of several processes, whichever decided the request. An entry over which our code raises
    is noted in ``failures``; those behind it are settled all the same.
    """
    for entry in message.http_logs.log_entry:
        try:
            _receive(entry, context, now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other entries are not to blame
            failures.record("an access log entry could not be read", error)


def _receive(entry: HttpAccessLogEntry, context: StreamContext, now: float) -> None:
    outcome = read_outcome(entry)
    effects = context.core.on_outcome(outcome, now) if outcome.ticket else []
    if outcome.ticket and context.core.has_no_record(outcome.ticket) and (orphan := _orphan(entry, outcome)):
        effects += context.core.on_orphaned_outcome(orphan, now)
    context.perform(effects)
    settled = next((one for one in effects if isinstance(one, OutcomeJoined)), None)
    if settled is None:
        context.metrics.count_unmatched_log_entry(has_ticket=bool(outcome.ticket))
    elif settled.is_ours:
        context.metrics.count_matched_log_entry(_arrived_s(entry) + outcome.duration_s)


def _orphan(entry: HttpAccessLogEntry, outcome: Outcome) -> OrphanedOutcome | None:
    """None without a usage log: then nobody knows whose it was."""
    text = _text(entry.common_properties.metadata.filter_metadata.get(NAMESPACE), USAGE_CONTEXT)
    return OrphanedOutcome(outcome, _contexts.decode(text), _arrived_s(entry)) if text else None


def _arrived_s(entry: HttpAccessLogEntry) -> float:
    start = entry.common_properties.start_time
    return start.seconds + start.nanos * 1e-9


def read_outcome(entry: HttpAccessLogEntry) -> Outcome:
    """A request's outcome in an entry; an empty ticket if extproc had no part in it."""
    common = entry.common_properties
    metadata, response = common.metadata.filter_metadata, entry.response
    flags = {field.name for field, _ in common.response_flags.ListFields()}
    ours, served, usage = (
        metadata.get(NAMESPACE),
        metadata.get(SERVED_NAMESPACE),
        _numbers(metadata.get(USAGE_NAMESPACE)),
    )
    found = Outcome(
        ticket=_text(ours, TICKET),
        status=_status(response),
        served=_text(served, SERVED_HOST),
        duration_s=_seconds(common.duration),
        ttfb_s=_ttfb_s(common),
        prompt_tokens=_whole(usage, PROMPT_TOKENS),
        completion_tokens=_whole(usage, COMPLETION_TOKENS),
        cached_tokens=_whole(usage, CACHED_TOKENS),
        created_tokens=_whole(usage, CREATED_TOKENS),
        reasoning_tokens=_whole(usage, REASONING_TOKENS),
        first_content_s=_microseconds(usage, FIRST_CONTENT_US),
        has_left="downstream_connection_termination" in flags,
        # a chunked answer that ends without its last chunk is an error of the protocol
        was_cut=not flags.isdisjoint(_ENGINE_CUTS),
        answer_bytes=response.response_body_bytes,
        has_timed_out=not flags.isdisjoint(_TIME_LIMITS),
        is_own_limit=_OWN_LIMIT in flags,
        events=_whole(usage, EVENTS),
        is_cut=not flags.isdisjoint(_CUTS),
        is_encoded=is_encoded(response.response_headers.get(CONTENT_ENCODING, "")),
        served_by=_server(common.upstream_cluster),
        attempts=common.upstream_request_attempt_count,
        engine_s=_engine_s(common),
        retry_after_s=_retry_after_s(response),
        refused=_texts(metadata.get(ROUTE_NAMESPACE), REFUSED),
        errors=frozenset(_texts(metadata.get(ROUTE_NAMESPACE), ERRORS)),
        pauses=_pauses(metadata.get(PAUSES_NAMESPACE)),
    )
    return _of_translated(found, entry) if common.upstream_cluster == TRANSLATOR_CLUSTER else found


def _of_translated(seen: Outcome, entry: HttpAccessLogEntry) -> Outcome:
    """What a second listener of Envoy has seen of the engines. Where nothing came back, only a client that left or a
    time limit that ended the request shows that an engine had it.
    """
    metadata = entry.common_properties.metadata.filter_metadata
    found = metadata.get(TRANSLATED_NAMESPACE)
    if seen.prompt_tokens == 0:
        # messages and responses have numbers also where their engine has reported none, or does so at the end
        seen = msgspec.structs.replace(seen, prompt_tokens=None, completion_tokens=seen.completion_tokens or None)
    if found is None:
        if not (seen.has_left or seen.has_timed_out):
            return msgspec.structs.replace(seen, served="", retry_after_s=None, is_of_gateway=True)
        first = _text(metadata.get(LB_NAMESPACE), DESTINATION).partition(",")[0]
        return msgspec.structs.replace(seen, served=first, attempts=1)
    details, cut = _text(found, TRANSLATED_DETAILS), found.fields.get(TRANSLATED_CUT)
    has_timed_out = seen.has_timed_out or details in TIMEOUT_DETAILS
    return msgspec.structs.replace(
        seen,
        # at a time limit the second listener has cut it, not the engine
        was_cut=seen.was_cut and not has_timed_out,
        # without it the translator has ended in the middle of a stream
        is_of_gateway=seen.was_cut and not (cut is not None and cut.bool_value),
        served=_text(found, SERVED_HOST),
        attempts=_whole(_numbers(found), TRANSLATED_ATTEMPTS) or 0,
        has_timed_out=has_timed_out,
        retry_after_s=seen.retry_after_s if details == _BY_ENGINE else None,
    )


def _status(response: HttpResponseProperties) -> int:
    """Of HTTP. Calls of gRPC fail with 200: what failed stands in their trailers, or in headers without a body."""
    status = response.response_code.value
    text = response.response_trailers.get(GRPC_STATUS) or response.response_headers.get(GRPC_STATUS) or ""
    if status == _OK and len(text) <= _MOST_STATUS_DIGITS and text.isascii() and text.isdigit():
        return http_status(int(text))
    return status


def _retry_after_s(response: HttpResponseProperties) -> float | None:
    """As the engine says: if it cannot be reached, the header is Envoy's."""
    if response.response_code_details != _BY_ENGINE:
        return None
    return read_retry_after(response.response_headers.get(RETRY_AFTER, ""))


def _pauses(namespace: Struct | None) -> dict[str, float | None]:
    if namespace is None:
        return {}
    return {server: read_retry_after(value.string_value) for server, value in namespace.fields.items()}


def _text(namespace: Struct | None, key: str) -> str:
    value = None if namespace is None else namespace.fields.get(key)
    return "" if value is None else value.string_value


def _texts(namespace: Struct | None, key: str) -> dict[str, str]:
    value = None if namespace is None else namespace.fields.get(key)
    return {} if value is None else {name: one.string_value for name, one in value.struct_value.fields.items()}


def _server(cluster: str) -> str:
    """The ModelServer of a cluster; empty if it is none's."""
    return cluster.removeprefix(SERVER_CLUSTER) if cluster.startswith(SERVER_CLUSTER) else ""


def _numbers(namespace: Struct | None) -> dict[str, float]:
    if namespace is None:
        return {}
    return {key: value.number_value for key, value in namespace.fields.items() if value.HasField("number_value")}


def _whole(usage: dict[str, float], key: str) -> int | None:
    number = usage.get(key)
    # NaN compares as False
    return int(number) if number is not None and 0 <= number <= MOST_REPORTED else None


def _microseconds(usage: dict[str, float], key: str) -> float | None:
    number = usage.get(key)
    # clocks may be set during an answer; NaN compares as False
    return number * 1e-6 if number is not None and 0 <= number < 10**_MOST_DIGITS else None


def _ttfb_s(common: AccessLogCommon) -> float | None:
    text = common.custom_tags.get(TTFT_TAG, "")
    return int(text) * 1e-6 if len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else None


def _engine_s(common: AccessLogCommon) -> float | None:
    if not (common.HasField("time_to_last_upstream_tx_byte") and common.HasField("time_to_first_upstream_rx_byte")):
        return None
    return max(0.0, _seconds(common.time_to_first_upstream_rx_byte) - _seconds(common.time_to_last_upstream_tx_byte))


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9
