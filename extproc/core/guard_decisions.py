# SPDX-License-Identifier: Apache-2.0
"""Guards, pure: which requests a service must pass, what it gets of them, and what follows from its answer.

A guard answers ``{"action": "allow"}``, ``refuse`` with ``status`` and ``message``, or ``change`` with the members to
replace (``fields``) or a whole ``body``. Whatever else it answers is a failure of the guard, never of the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

from extproc.core.payload_log import CloudEvent, event_attributes
from extproc.core.request_record import Arrival
from extproc.refusals import GuardRefused, GuardUnavailable, Refusal
from extproc.request.json_rewrite import has_unambiguous_names, with_changes
from extproc.wire_names import ANONYMOUS

if TYPE_CHECKING:
    from extproc.admission.guard_services_by_route import RouteGuardConfig
    from extproc.core.request_builder import RequestBuilder

_LONGEST_TEXT: Final = 1000
_LONGEST_ERROR: Final = 200
# Those of 4xx that Envoy can answer with, but for 401 and 407, which are about credentials.
_STATUSES: Final = frozenset({400, *range(402, 407), *range(408, 418), *range(421, 425), 426, 428, 429, 431})
_OK, _NO_CONTENT = 200, 204

EVENT: Final = "dev.attache.guard.request"

# What a guard has answered, or why there is no answer.
Verdict = Literal["allowed", "refused", "changed"]
VERDICTS: Final = frozenset(get_args(Verdict))
Failure = Literal["timeout", "unreachable", "status", "invalid", "busy", "paused", "unknown", "internal"]
# Failures in a row, from which on a guard is taken for dead.
_MOST_FAILURES: Final = 5
_PAUSE_S: Final = 1.0
# A caller that has asked within this time is there.
_LATELY_S: Final = 60.0
_EVERYBODY: Final = ""


class GuardReply(msgspec.Struct, frozen=True):
    """Its HTTP answer."""

    status: int
    body: bytes
    took_s: float = 0.0


# What a simulation answers.
ALLOWED: Final = GuardReply(_NO_CONTENT, b"")


class GuardFailed(msgspec.Struct, frozen=True):
    """There is no answer. ``detail``: for the log."""

    why: Failure
    detail: str
    took_s: float = 0.0

    @classmethod
    def of_internal_error(cls, error: Exception) -> GuardFailed:
        """Nobody has foreseen ``error``, which is logged apart."""
        return cls("internal", f"an error of extproc: {type(error).__name__}")


class GuardPassed(msgspec.Struct, frozen=True):
    """The request goes on as ``arrival``. ``result``: in metrics. ``text``: for people. ``detail``: of a failure, for
    the log.
    """

    arrival: Arrival
    result: Verdict | Failure
    text: str
    detail: str = ""


class GuardStopped(Exception):
    """The request does not go on. The fields are those of ``GuardPassed``."""

    def __init__(self, refusal: Refusal, result: Verdict | Failure, detail: str = "") -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.result = result
        self.detail = detail


class _Invalid(Exception):
    """The answer cannot be followed. The message is what is wrong."""


class _Answer(msgspec.Struct, frozen=True):
    action: Literal["allow", "refuse", "change"]
    status: int = 403
    message: str = ""
    # for the operator; the client does not get it
    reason: str = ""
    fields: dict[str, msgspec.Raw] | None = None
    body: msgspec.Raw = msgspec.Raw()


_answers: Final = msgspec.json.Decoder(_Answer)


def guard_event(arrival: Arrival, ticket: str, source: str) -> CloudEvent:
    """What a guard gets. The body is as its engine will read it, so that no repeated or escaped name hides anything; of
    a form, and where the path names the model, there is none.
    """
    request = arrival.request
    attributes: dict[str, str | int] = {
        "specversion": "1.0",
        "id": ticket,
        "source": source,
        "type": EVENT,
        **event_attributes(arrival, ticket),
        "api": "" if request.api is None else request.api.name.lower(),
        "bytes": len(arrival.body),
    }
    if not _is_json(arrival):
        return CloudEvent({**attributes, "omitted": "not-json"}, None)
    if not request.has_text_prompt:
        attributes["unreadable"] = "tokens"
    body = arrival.body
    if not has_unambiguous_names(body, request.contents):
        body = with_changes(body, {}, request.contents)
    return CloudEvent({**attributes, "datacontenttype": "application/json"}, body)


def _is_json(arrival: Arrival) -> bool:
    api = arrival.request.api
    return api is not None and api.spec.body == "json"


def apply_guard_reply(
    guard: RouteGuardConfig, arrival: Arrival, reply: GuardReply | GuardFailed, builder: RequestBuilder
) -> GuardPassed:
    """What becomes of the request; raises GuardStopped."""
    if isinstance(reply, GuardFailed):
        return _without(guard, arrival, reply.why, reply.detail)
    if reply.status not in {_OK, _NO_CONTENT}:
        return _without(guard, arrival, "status", f"it answers {reply.status}, and not 200")
    try:
        return _follow(guard, arrival, _answer_in(reply), builder)
    except _Invalid as error:
        return _without(guard, arrival, "invalid", str(error))


def _answer_in(reply: GuardReply) -> _Answer:
    if reply.status == _NO_CONTENT:
        return _Answer("allow")
    try:
        return _answers.decode(reply.body)
    except RecursionError:
        raise _Invalid("its answer is nested too deeply") from None
    except ValueError as error:  # of msgspec, and of text that is no UTF-8
        raise _Invalid(f"its answer cannot be read: {str(error)[:_LONGEST_ERROR]}") from None


def _follow(guard: RouteGuardConfig, arrival: Arrival, answer: _Answer, builder: RequestBuilder) -> GuardPassed:
    reason = f": {answer.reason[:_LONGEST_TEXT]}" if answer.reason else ""
    match answer.action:
        case "allow":
            return GuardPassed(arrival, "allowed", f"'{guard.name}' allowed it{reason}")
        case "change":
            changed = _changed(guard, arrival, answer, builder)
            return GuardPassed(changed, "changed", f"'{guard.name}' changed it{reason}")
        case "refuse":
            if answer.status not in _STATUSES:
                raise _Invalid(f"it refuses with status {answer.status}, which is none for that")
            message = answer.message[:_LONGEST_TEXT] or "The request is refused by a guard of this gateway."
            raise GuardStopped(GuardRefused(message, status=answer.status), "refused", answer.reason[:_LONGEST_TEXT])


def _changed(guard: RouteGuardConfig, arrival: Arrival, answer: _Answer, builder: RequestBuilder) -> Arrival:
    """As the guard wants it, read as a client's body is."""
    whole = bytes(answer.body)
    if bool(whole) == (answer.fields is not None):
        raise _Invalid("it changes a request without one of 'fields' and 'body'")
    if not _is_json(arrival):
        raise _Invalid("it changes a request that is no JSON")
    body = whole or with_changes(arrival.body, dict(answer.fields or {}))
    if len(body) > guard.max_changed_body_bytes(len(arrival.body)):
        raise _Invalid(f"it changes a body to one of {len(body)} bytes")
    try:
        return builder.with_body(arrival, body)
    except Refusal as refusal:
        raise _Invalid(f"the changed request is not valid: {refusal.message}") from None


def _without(guard: RouteGuardConfig, arrival: Arrival, why: Failure, detail: str) -> GuardPassed:
    """By the failure mode; raises GuardStopped."""
    if guard.is_open:
        return GuardPassed(arrival, why, f"'{guard.name}' did not answer ({why}), so it went on without", detail)
    message = "The request could not be checked, as a guard of this gateway does not answer; try again later."
    raise GuardStopped(GuardUnavailable(message, retry_after_s=1), why, detail)


def guard_call_owner(arrival: Arrival) -> str:
    """Whose call of a guard it is: the tenant's, or without one the key's or the user's."""
    caller = arrival.caller
    return caller.tenant if caller.tenant != ANONYMOUS else caller.api_key or caller.user or ANONYMOUS


class GuardCircuitBreaker(msgspec.Struct):
    """Spares requests the time limit of a guard that is dead: after some failures in a row, one request in each pause
    tries it, and for all others it has failed.

    A text can make the guard slow for its sender alone. So timeouts pause it only if they are of two callers, or of the
    only one that has asked lately. Of a caller's calls that ran at the same time, one timeout counts. A connection that
    fails counts as everybody's.
    """

    failures: int = 0
    # when each caller's last failure ended
    failing: dict[str, float] = {}
    # the latest two
    callers: dict[str, float] = {}
    answered_at_s: float = 0.0
    retry_at_s: float = 0.0

    def may_call(self, caller: str, now: float) -> bool:
        """Whether the guard is called for this request."""
        _keep_latest(self.callers, caller, now, most=2)
        is_alone = not any(name != caller and now - at_s < _LATELY_S for name, at_s in self.callers.items())
        if self.failures < _MOST_FAILURES or (len(self.failing) == 1 and not is_alone):
            return True
        if now < self.retry_at_s:
            return False
        self.retry_at_s = now + _PAUSE_S
        return True

    def record_answer(self, now: float) -> None:
        """The guard has answered a call."""
        self.failures, self.answered_at_s = 0, now
        self.failing.clear()

    def record_failure(self, caller: str, now: float, *, began_s: float, is_timeout: bool) -> None:
        """It has not. A timeout counts unless the guard has answered since the call began."""
        if is_timeout and max(self.answered_at_s, self.failing.get(caller, 0.0)) > began_s:
            return
        self.failures += 1
        for name in (caller,) if is_timeout else (caller, _EVERYBODY):
            _keep_latest(self.failing, name, now, most=_MOST_FAILURES)
        if self.failures >= _MOST_FAILURES:
            self.retry_at_s = now + _PAUSE_S


def _keep_latest(times: dict[str, float], name: str, now: float, *, most: int) -> None:
    times.pop(name, None)
    times[name] = now
    if len(times) > most:
        del times[next(iter(times))]
