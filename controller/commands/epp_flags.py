# SPDX-License-Identifier: Apache-2.0
"""The flags of llm-d's endpoint picker and of its ancestors: which have a meaning here, and what the others come to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Sort = Literal["text", "number", "truth", "duration"]
Fate = Literal["obeyed", "accepted", "refused"]


class Flag(msgspec.Struct, frozen=True):
    """``default``: here, as text. ``fate``: what it comes to; ``note``: how, or why not. A flag that is refused may be
    given with ``harmless``, the value that asks for nothing.
    """

    name: str
    sort: Sort
    fate: Fate
    note: str
    default: str = ""
    harmless: str = ""


FLAGS: Final = (
    Flag("pool-name", "text", "obeyed", "the InferencePool; or --endpoint-selector"),
    Flag("pool-namespace", "text", "obeyed", "its namespace; without it $NAMESPACE, or else `default`"),
    Flag("pool-group", "text", "obeyed", "its API group", "inference.networking.k8s.io"),
    Flag("endpoint-selector", "text", "obeyed", "pods by labels `a=b,c=d`, in place of a pool; no other operators"),
    Flag("endpoint-target-ports", "text", "obeyed", "their ports, with --endpoint-selector"),
    Flag("config-file", "text", "obeyed", "the EndpointPickerConfig; a change of the file is used within a second"),
    Flag("config-text", "text", "obeyed", "the same as text"),
    Flag("grpc-port", "number", "obeyed", "where the gateway calls", "9002"),
    Flag("grpc-health-port", "number", "obeyed", "gRPC's health service, without TLS", "9003"),
    Flag("metrics-port", "number", "obeyed", "extproc's metrics; those of the role are on the next port", "9090"),
    Flag("secure-serving", "truth", "obeyed", "TLS on the gRPC port", "true"),
    Flag("cert-path", "text", "obeyed", "a folder with tls.crt and tls.key; without it the certificate is self-signed"),
    Flag("drain-timeout", "duration", "obeyed", "how long running requests may take to end after SIGTERM", "2m"),
    Flag("refresh-metrics-interval", "duration", "obeyed", "`scrapeInterval` of the pool's ModelServer", "200ms"),
    Flag("total-queued-requests-metric", "text", "obeyed", "says which engine it is: vLLM, SGLang or TensorRT-LLM"),
    Flag("total-running-requests-metric", "text", "obeyed", "the same"),
    Flag("kv-cache-usage-percentage-metric", "text", "obeyed", "the same"),
    Flag("kubeconfig", "text", "obeyed", "where the API server is, outside a cluster"),
    Flag("enable-cert-reload", "truth", "accepted", "certificates are always followed"),
    Flag("health-checking", "truth", "accepted", "the gRPC port always has the health service, too"),
    Flag("lora-info-metric", "text", "accepted", "follows from the engine"),
    Flag("cache-info-metric", "text", "accepted", "follows from the engine"),
    Flag("ha-enable-leader-election", "truth", "accepted", "every replica serves; none stands by"),
    Flag("metrics-staleness-threshold", "duration", "accepted", "old readings lose weight with age"),
    Flag("refresh-prometheus-metrics-interval", "duration", "accepted", "metrics are always up to date"),
    Flag("grpc-max-recv-msg-size", "text", "accepted", "the gateway bounds what a request may have"),
    Flag("grpc-max-send-msg-size", "text", "accepted", "the same"),
    Flag("grpc-enable-compression", "truth", "accepted", "nothing is compressed"),
    Flag(
        "enable-grpc-stream-metrics",
        "truth",
        "accepted",
        "attache_open_streams and attache_stream_seconds are always there",
    ),
    Flag("enable-pprof", "truth", "accepted", "there is none"),
    Flag("tracing", "truth", "accepted", "no traces are sent"),
    Flag("emit-endpoint-scores", "truth", "accepted", "no scores are sent; `attache explain` shows them"),
    Flag("allow-experimental-plugins", "truth", "accepted", "the plugins that there are may be used"),
    Flag(
        "metrics-endpoint-auth", "truth", "accepted", "metrics are served without authentication; use a NetworkPolicy"
    ),
    Flag("v", "number", "accepted", "the log has one level"),
    Flag("zap-devel", "truth", "accepted", "the log has one form"),
    Flag("zap-encoder", "text", "accepted", "the log has one form"),
    Flag("zap-log-level", "text", "accepted", "the log has one level"),
    Flag("zap-stacktrace-level", "text", "accepted", "the log has one form"),
    Flag("zap-time-encoding", "text", "accepted", "the log has one form"),
    Flag("model-server-metrics-scheme", "text", "refused", "metrics are read by plain HTTP", harmless="http"),
    Flag("model-server-metrics-path", "text", "obeyed", "`metricsPath` of the pool's ModelServer"),
    Flag(
        "model-server-metrics-port", "number", "refused", "metrics are read from each endpoint's own port", harmless="0"
    ),
    Flag("model-server-metrics-https-insecure-skip-verify", "truth", "accepted", "metrics are read by plain HTTP"),
    Flag("disable-endpoint-subset-filter", "truth", "refused", "the subset hint is always obeyed", harmless="false"),
    Flag("enable-multi-engine", "truth", "refused", "a pool has one kind of engine", harmless="false"),
    Flag("engine-label-key", "text", "accepted", "a pool has one kind of engine"),
    Flag("metrics-cert-dir", "text", "refused", "metrics have no TLS; use a NetworkPolicy"),
    Flag("metrics-client-ca-file", "text", "refused", "metrics have no TLS; use a NetworkPolicy"),
)
"""Names and meanings are those of llm-d-router's ``pkg/epp/server/options.go`` and of the Inference Extension's before
it.
"""

BY_NAME: Final[Mapping[str, Flag]] = MappingProxyType({one.name: one for one in FLAGS})


class FlagInvalid(Exception):
    """The flags cannot be used; the message says what to write."""


class Given(msgspec.Struct, frozen=True):
    """``values``: of flags that are obeyed, defaults included. ``notes``: a line for each that has no effect."""

    values: Mapping[str, str]
    notes: tuple[str, ...]


def read_flags(words: Sequence[str]) -> Given:
    """Flags as Go's pflag reads them, one dash or two, and ``camelCase`` as of the first versions; raises
    FlagInvalid.
    """
    values = {one.name: one.default for one in FLAGS if one.fate == "obeyed" and one.default}
    notes = []
    for flag, value in _pairs(words):
        _check(flag, value)
        if flag.fate == "refused" and value != flag.harmless:
            raise FlagInvalid(f"--{flag.name}={value}: {flag.note}")
        if flag.fate == "obeyed":
            values[flag.name] = value
        elif flag.fate == "accepted":
            notes.append(f"--{flag.name} has no effect: {flag.note}")
    return Given(values, tuple(notes))


def _pairs(words: Sequence[str]) -> list[tuple[Flag, str]]:
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in {"-", "--"}:
            raise FlagInvalid(f"'{word}' is no flag")
        name, has_value, value = word.lstrip("-").partition("=")
        flag = BY_NAME.get(_kebab(name))
        if flag is None:
            raise FlagInvalid(f"there is no flag '--{name}'")
        if not has_value:
            # a truth takes no word of its own: "--tracing false" means --tracing, and a stray word
            if flag.sort == "truth":
                value = "true"
            elif rest:
                value = rest.pop(0)
            else:
                raise FlagInvalid(f"--{flag.name} needs a value")
        found.append((flag, value.lower() if flag.sort == "truth" else value))
    return found


def _kebab(name: str) -> str:
    """``poolName`` is ``pool-name``."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)


def _check(flag: Flag, value: str) -> None:
    if flag.sort == "truth" and value not in {"true", "false", "1", "0", "t", "f"}:
        raise FlagInvalid(f"--{flag.name}={value}: write true or false")
    if flag.sort == "number" and not value.lstrip("-").isdecimal():
        raise FlagInvalid(f"--{flag.name}={value}: write a number")


def is_true(value: str) -> bool:
    """As Go's ParseBool."""
    return value in {"true", "1", "t"}
