# SPDX-License-Identifier: Apache-2.0
"""What a client asks an API server for, and what manifests allow: a role should need all that it may do, and no
more.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import SimpleNamespace

    from yarl import URL

    from controller.kube.client import Client

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_NAME = "metadata.name="


class Permission(NamedTuple):
    """``name``: of one object; empty: of any."""

    verb: str
    group: str
    resource: str
    name: str = ""


@contextlib.contextmanager
def asked_for(client: Client) -> Iterator[set[Permission]]:
    """The permissions that the client's calls inside the context need."""
    found: set[Permission] = set()

    async def note(_: aiohttp.ClientSession, __: SimpleNamespace, params: aiohttp.TraceRequestStartParams) -> None:
        needed = permission(params.method, params.url)
        if needed is not None:
            found.add(needed)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(note)
    trace.freeze()
    client._http.trace_configs.append(trace)
    try:
        yield found
    finally:
        client._http.trace_configs.remove(trace)


def permission(method: str, url: URL) -> Permission | None:
    """None for what everybody may ask: which kinds there are."""
    parts = url.path.strip("/").split("/")
    group = parts[1] if parts[0] == "apis" else ""
    rest = parts[3:] if parts[0] == "apis" else parts[2:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    if not rest:
        return None
    plural, name, subresource = [*rest, "", ""][:3]
    fields = url.query.get("fieldSelector", "")
    if not name and fields.startswith(_NAME):
        name = fields.removeprefix(_NAME)
    reading = "get" if len(rest) > 1 else "watch" if url.query.get("watch") in {"1", "true"} else "list"
    resource = f"{plural}/{subresource}" if subresource else plural
    return Permission(_VERBS.get(method, reading), group, resource, name)


def allowed_by(file: Path, kinds: tuple[str, ...] = ("Role", "ClusterRole")) -> set[Permission]:
    """What the roles in a manifest allow."""
    documents: list[Any] = [one for one in yaml.safe_load_all(file.read_text()) if one["kind"] in kinds]
    return {
        Permission(verb, group, resource, name)
        for document in documents
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or ("",)
    }


def unused(allowed: set[Permission], asked: set[Permission]) -> set[Permission]:
    """Permissions that nobody needed."""
    return {one for one in allowed if not any(one[:3] == need[:3] and one.name in {"", need.name} for need in asked)}


def missing(allowed: set[Permission], asked: set[Permission]) -> set[Permission]:
    """Permissions that somebody needed and does not have."""
    return {need for need in asked if not any(one[:3] == need[:3] and one.name in {"", need.name} for one in allowed)}
