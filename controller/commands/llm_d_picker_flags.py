# SPDX-License-Identifier: Apache-2.0
"""llm-d's flags: which there are, what they come to here, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Sort = Literal["text", "number", "truth", "duration"]
Fate = Literal["obeyed", "accepted", "refused"]
_NUMBER: Final = re.compile("-?[0-9]{1,18}")
_VERSIONS: Final = ("VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13")
# Go's names of suites of TLS 1.2, and OpenSSL's.
_SUITES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
        "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
        "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
        "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
        "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
        "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
        "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
        # these three are among Go's insecure ones
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256": "ECDHE-ECDSA-AES128-SHA256",
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256": "ECDHE-RSA-AES128-SHA256",
        "TLS_RSA_WITH_AES_128_CBC_SHA256": "AES128-SHA256",
    }
)
# Go has them still; OpenSSL is built without them.
_BROKEN: Final = ("RC4", "3DES")
# TLS 1.3 has all of them always, in llm-d, too. A list of these alone leaves nothing of TLS 1.2.
_SUITES_OF_TLS_13: Final = frozenset(
    {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"}
)


class Flag(msgspec.Struct, frozen=True):
    """``default``: here, as text. ``fate``: how it is handled; ``note``: the details, or the reason. A refused flag is
    accepted with ``harmless``, its value without effect.
    """

    name: str
    sort: Sort
    fate: Fate
    note: str
    default: str = ""
    harmless: str = ""


FLAGS: Final = (
    Flag(
        "pool-name",
        "text",
        "obeyed",
        "the InferencePool; or --endpoint-selector. With file-discovery any name, or none",
    ),
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
    Flag("tls-min-version", "text", "obeyed", "VersionTLS13: no TLS 1.2; older versions are never taken"),
    Flag(
        "tls-cipher-suites",
        "text",
        "obeyed",
        "of TLS 1.2, by Go's names, but those with RC4 and 3DES; names of TLS 1.3 alone: no TLS 1.2",
    ),
    Flag("drain-timeout", "duration", "obeyed", "how long running requests may take to end after SIGTERM", "2m"),
    Flag("refresh-metrics-interval", "duration", "obeyed", "`scrapeInterval` of the pool's ModelServer", "200ms"),
    Flag(
        "total-queued-requests-metric", "text", "obeyed", "determines the kind of engine: vLLM, SGLang or TensorRT-LLM"
    ),
    Flag("total-running-requests-metric", "text", "obeyed", "the same"),
    Flag("kv-cache-usage-percentage-metric", "text", "obeyed", "the same"),
    Flag("kubeconfig", "text", "obeyed", "where the API server is, outside a cluster"),
    Flag("enable-cert-reload", "truth", "accepted", "certificates are always followed"),
    Flag("health-checking", "truth", "accepted", "the gRPC port always has the health service, too"),
    Flag("lora-info-metric", "text", "accepted", "follows from the engine"),
    Flag("cache-info-metric", "text", "accepted", "follows from the engine"),
    Flag(
        "ha-enable-leader-election",
        "truth",
        "accepted",
        "every replica serves, none stands by; they share what they know by --redis",
    ),
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
    Flag(
        "tracing",
        "truth",
        "obeyed",
        "spans of requests that the gateway samples, where OpenTelemetry's variables name a collector",
        "true",
    ),
    Flag("emit-endpoint-scores", "truth", "obeyed", "the scores of all endpoints, in metadata of `envoy.lb`", "false"),
    Flag("allow-experimental-plugins", "truth", "accepted", "the plugins that there are may be used"),
    Flag(
        "metrics-endpoint-auth",
        "truth",
        "obeyed",
        "metrics only for tokens that may get them, by TokenReview and SubjectAccessReview; true in a cluster; "
        "without one, tokens cannot be checked",
    ),
    Flag("v", "number", "accepted", "write --log-level"),
    Flag("zap-devel", "truth", "accepted", "the log has one form"),
    Flag("zap-encoder", "text", "accepted", "write --log-format json for JSON lines"),
    Flag("zap-log-level", "text", "accepted", "write --log-level"),
    Flag("zap-stacktrace-level", "text", "accepted", "the log has one form"),
    Flag("zap-time-encoding", "text", "accepted", "the log has one form"),
    Flag(
        "model-server-metrics-scheme",
        "text",
        "obeyed",
        "https: engines are reached by TLS, `connection.tls` of the pool's ModelServer",
        "http",
    ),
    Flag("model-server-metrics-path", "text", "obeyed", "`metricsPath` of the pool's ModelServer"),
    Flag(
        "model-server-metrics-port",
        "number",
        "obeyed",
        "`metricsPort` of the pool's ModelServer; 0: each endpoint's own",
        "0",
    ),
    Flag(
        "model-server-metrics-https-insecure-skip-verify",
        "truth",
        "obeyed",
        "with https; to verify, write metrics-data-source with caCertPath into the EndpointPickerConfig",
        "true",
    ),
    Flag("disable-endpoint-subset-filter", "truth", "refused", "the subset hint is always obeyed", harmless="false"),
    Flag("enable-multi-engine", "truth", "accepted", "the label llm-d.ai/engine-type of a pod is always obeyed"),
    Flag(
        "engine-label-key",
        "text",
        "refused",
        "write engineLabelKey of a core-metrics-extractor into the file",
        harmless="llm-d.ai/engine-type",
    ),
    Flag("metrics-cert-dir", "text", "refused", "metrics have no TLS; use a NetworkPolicy"),
    Flag("metrics-client-ca-file", "text", "refused", "metrics have no TLS; use a NetworkPolicy"),
)
"""Names and meanings are those of llm-d-router's ``pkg/epp/server/options.go`` and of the Inference Extension's before
it.
"""
BY_NAME: Final[Mapping[str, Flag]] = MappingProxyType({one.name: one for one in FLAGS})


class FlagInvalid(Exception):
    """The flags cannot be used; the message says what to write."""


class EppFlags(msgspec.Struct, frozen=True):
    """``values``: of flags that are obeyed, defaults included. ``notes``: a line for each that has no effect."""

    values: Mapping[str, str]
    notes: tuple[str, ...]


def read_flags(words: Sequence[str]) -> EppFlags:
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
        if flag.name == "tls-min-version" and value in _VERSIONS[:2]:
            notes.append(f"--{flag.name}={value} has no effect: TLS 1.2 is the oldest version that is accepted")
        elif flag.fate == "accepted":
            notes.append(f"--{flag.name} has no effect: {flag.note}")
    return EppFlags(values, tuple(notes))


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
    if flag.sort == "number" and not _NUMBER.fullmatch(value):
        raise FlagInvalid(f"--{flag.name}={value}: write a number")


def is_true(value: str) -> bool:
    """As Go's ParseBool."""
    return value in {"true", "1", "t"}


def tls_options(values: Mapping[str, str]) -> tuple[str, ...]:
    """Options of extproc; raises FlagInvalid."""
    version, suites = values.get("tls-min-version", ""), values.get("tls-cipher-suites", "")
    if version and version not in _VERSIONS:
        raise FlagInvalid(f"--tls-min-version={version}: write one of {', '.join(_VERSIONS)}")
    names = [name.strip() for name in suites.split(",") if name.strip()]
    for name in names:
        if any(cipher in name for cipher in _BROKEN) and name.startswith("TLS_"):
            raise FlagInvalid(f"--tls-cipher-suites: {name} is broken, and OpenSSL has it no more; remove it")
        if name not in _SUITES and name not in _SUITES_OF_TLS_13:
            raise FlagInvalid(f"--tls-cipher-suites: there is no '{name}'; write some of {', '.join(_SUITES)}")
    chosen = [_SUITES[name] for name in names if name in _SUITES]
    has_tls_13_alone = version == "VersionTLS13" or (names and not chosen)
    return (
        *(("--tls-min-version", "1.3") if has_tls_13_alone else ()),
        *(("--tls-ciphers", ":".join(chosen)) if chosen else ()),
    )
