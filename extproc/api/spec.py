# SPDX-License-Identifier: Apache-2.0
"""Types that the kinds share: patterns of text, names of objects, CEL rules for their CRDs, selectors and parents."""

from __future__ import annotations

from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# ``\Z``, as ``$`` would also match before a line break at the end.
NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z"
NAMESPACE: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"
# With the namespace and name of its Gateway in front, if it is one's: ``default/web/https``.
LISTENER: Final = r"^[a-z0-9]([-a-z0-9./]{0,198}[a-z0-9])?\Z"
# The name of the listener of transformers and explainers; others have no capitals.
STEPS_LISTENER: Final = "Steps"
NO_CONTROL: Final = r"^[^\x00-\x1f\x7f]*\Z"
# What a client can send as a token of the header ``authorization``.
KEY: Final = r"^[\x21-\x7e]*\Z"
# Of a request for one of our own pages: written into its first line as it is.
HTTP_PATH: Final = r"^/[\x21-\x7e]*\Z"
# Without a query; or nothing.
OWN_PATH: Final = r"^(/[!\x24-\x3e\x40-\x7e]*)?\Z"
# What stands before paths; or nothing.
PATH_PREFIX: Final = r"^(/[!\x24-\x3e\x40-\x7e]*[!\x24-\x2e\x30-\x3e\x40-\x7e])?\Z"
# A whole path, with or without a query.
PATH_AND_QUERY: Final = r"^/[!\x24-\x3e\x40-\x7e]*(\?[!\x24-\x7e]*)?\Z"
# Of a region or a service.
AWS_NAME: Final = r"^[0-9a-z]([-0-9a-z]*[0-9a-z])?\Z"
# A key of a Secret's or a ConfigMap's data.
DATA_KEY: Final = r"^[-._a-zA-Z0-9]+\Z"
HEADER: Final = r"^[0-9A-Za-z-]+\Z"
# A name or an IP address, IPv6 without brackets; no scheme, path or user.
HOST: Final = r"^[0-9A-Za-z:]([-.0-9A-Za-z:]*[0-9A-Za-z])?\Z"
# Of another's configuration, where an empty text means the default.
HEADER_OR_EMPTY: Final = r"^[0-9A-Za-z_-]*\Z"
ISOLATION: Final = r"^(Tenant|User|Shared|Header:[0-9A-Za-z!#$%&'*+.^`|~-]+)\Z"
# Claims of tokens; a dot goes into an object.
CLAIM: Final = r"^[^\x00-\x1f\x7f.]+(\.[^\x00-\x1f\x7f.]+)*\Z"
# A name, or the beginning or the end of names.
WILDCARD: Final = r"^(\*|[^*\x00-\x1f\x7f]+\*?|\*[^*\x00-\x1f\x7f]+)\Z"
# By ISO 4217.
CURRENCY: Final = r"^[A-Z]{3}\Z"
# In hexadecimal, lower case.
SHA256: Final = r"^[0-9a-f]{64}\Z"
KEY_ID: Final = r"^[0-9a-f]{12}\Z"
LABEL_VALUE: Final = r"^([0-9A-Za-z]([-0-9A-Za-z_.]*[0-9A-Za-z])?)?\Z"
HTTPS_URL: Final = (
    r"^https://([0-9A-Za-z]([-.0-9A-Za-z]*[0-9A-Za-z])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-\"$-~]*)?\Z"
)
ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        NAME: "is not a name; write lower-case letters, digits, '-' and '.' (at most 253)",
        NAMESPACE: "is not a namespace; write lower-case letters, digits and '-' (at most 63)",
        LISTENER: "is no name of a listener; write lower-case letters, digits, '-', '.' and '/' (at most 200)",
        NO_CONTROL: "has a control character, such as a line break; leave it out",
        KEY: "has a character that no client can send in a header; write ASCII letters, digits and signs, no spaces",
        OWN_PATH: "is no path; write one that begins with '/' and has no spaces, '?' or '#', such as /healthz",
        HTTP_PATH: "is no path; write one that begins with '/' and has no spaces, such as /metrics",
        PATH_PREFIX: "is no beginning of paths; write one that begins with '/', does not end in '/', and has no spaces,"
        " '?' or '#', such as /api/openai",
        PATH_AND_QUERY: "is no path; write one that begins with '/' and has no spaces or '#', such as"
        " /openai/deployments/gpt/chat/completions?api-version=2024-10-21",
        AWS_NAME: "is no name of AWS; write lower-case letters, digits and '-', such as us-east-1",
        DATA_KEY: "is no key of a Secret's or ConfigMap's data; write letters, digits, '-', '_' and '.'",
        HEADER: "is no name of a header; write letters, digits and '-'",
        HOST: "is no host; write its name or IP address alone, without scheme, port and path, such as api.example.com",
        HEADER_OR_EMPTY: "is no name of a header; write letters, digits, '-' and '_'",
        ISOLATION: "is not a choice; write Tenant, User, Shared or Header:NAME",
        WILDCARD: "is no name; '*' stands at its beginning or at its end, and control characters nowhere",
        HTTPS_URL: "is no address of TLS; write https://HOST/PATH, without a user and without '#'",
        SHA256: "is no SHA-256; write 64 hexadecimal digits in lower case",
        KEY_ID: "is no id of a key; leave it to attache keys, which makes 12 hexadecimal digits",
        CURRENCY: "is no currency; write its three capitals by ISO 4217, such as USD",
        LABEL_VALUE: "is no value of a label; write letters, digits, '-', '_' and '.', a letter or digit at each end",
        CLAIM: "is no claim; write a name, or names joined by single dots, such as realm.tenant",
    }
)
Name = Annotated[str, msgspec.Meta(pattern=NAME, max_length=253)]
Namespace = Annotated[str, msgspec.Meta(pattern=NAMESPACE, max_length=63)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=NO_CONTROL)]
API_VERSION: Final = "attache.dev/v1alpha1"
DEFAULT_NAMESPACE: Final = "default"
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
LabelValue = Annotated[str, msgspec.Meta(max_length=63, pattern=LABEL_VALUE)]


class CelRule(NamedTuple):
    """One rule of a struct: ``self`` in ``rule`` is an object of it, and ``message`` is what to write instead.

    Only the CEL standard's own functions, so that rules can be tried without an API server.
    """

    rule: str
    message: str


def exactly_one(*fields: str) -> CelRule:
    """Exactly one of the optional fields is there."""
    present = " + ".join(f"(has(self.{field}) ? 1 : 0)" for field in fields)
    return CelRule(f"{present} == 1", f"write exactly one of {', '.join(fields)}")


def both_or_neither(first: str, second: str) -> CelRule:
    """Both optional fields are there, or neither is."""
    return CelRule(f"has(self.{first}) == has(self.{second})", f"write both {first} and {second}, or neither")


class Spec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """camelCase, unknown fields refused. ``CEL``: what a CRD's schema must check beyond the fields' own types.
    ``UNSUPPORTED``: fields, and values of fields, that users of other software write, each with what to do instead.
    """

    CEL: ClassVar[tuple[CelRule, ...]] = ()
    UNSUPPORTED: ClassVar[dict[str, str]] = {}


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Kubernetes object metadata. ``creation_timestamp``: between equal routes the older decides."""

    name: Name
    namespace: Namespace = DEFAULT_NAMESPACE
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    creation_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(
        default=None, name="creationTimestamp"
    )

    @property
    def key(self) -> str:
        """``namespace/name``: the one spelling in memory, metrics, headers and Envoy's configuration."""
        return object_key(self.namespace, self.name)


class DirectoryObject(msgspec.Struct, frozen=True, kw_only=True):
    """A document of the configuration directory. Each kind is a subclass of that name, with its type of ``spec``."""

    metadata: Metadata
    spec: Any


def list_map_keys(*fields: str) -> dict[str, object]:
    """Schema extensions of a list whose items differ in ``fields``: Kubernetes refuses two alike, and merges by
    them.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(fields)}


def object_key(namespace: str, name: str) -> str:
    """``namespace/name``."""
    return f"{namespace}/{name}"


def namespace_of(key: str) -> str:
    """The namespace in ``namespace/name``."""
    return key.partition("/")[0]


def qualified_key(text: str) -> str:
    """``text`` as ``namespace/name``; a name alone is in the default namespace."""
    return text if "/" in text else object_key(DEFAULT_NAMESPACE, text)


class WorkloadSelector(Spec, frozen=True):
    """Pods of a ModelServer's namespace. ``match_labels``: a pod has all of these labels."""

    match_labels: Annotated[dict[str, LabelValue], msgspec.Meta(min_length=1, max_length=64)]


class WorkloadPort(Spec, frozen=True):
    """Where the engines in selected pods listen. ``port``: the engine's, or that of its first data-parallel rank.
    ``rank_ports``: those of further ranks; each rank is an endpoint of its own.
    """

    port: Port
    rank_ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=7)] = ()

    @property
    def ports(self) -> tuple[int, ...]:
        """All of them, by rank."""
        return (self.port, *self.rank_ports)


class ParentReference(Spec, frozen=True):
    """A gateway that a route is attached to, as in the Gateway API. ``name``: the gateway's. ``namespace``: the route's
    own, if left out. ``section_name``: one of its listeners; ``port``: listeners on this port. ``group`` and
    ``kind``: of the gateway.
    """

    name: Name
    namespace: Namespace | None = None
    section_name: NonEmpty | None = None
    port: Port | None = None
    group: str = "gateway.networking.k8s.io"
    kind: str = "Gateway"


def requirement_holds(key: str, operator: str, values: Collection[str], labels: Mapping[str, str]) -> bool:
    """Whether ``labels`` satisfy it. As in Kubernetes, a missing ``key`` satisfies NotIn; an unknown operator never
    holds.
    """
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return False


def is_attached(parent_refs: Iterable[ParentReference], listener: str) -> bool:
    """Whether a route with these references is served by the listener of that name.

    In a directory ``sectionName`` alone counts, as there are no gateways. A route that names no listener is served by
    all.
    """
    refs = tuple(parent_refs)
    return not refs or any(ref.section_name in (None, listener) for ref in refs)
