# SPDX-License-Identifier: Apache-2.0
"""The handlers: each event of a custom resource rings with the object's kind and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kopf

from controller.kube.kopf_settings import login

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.kube.access import Access
    from controller.kube.resources import Resource

Ring = Callable[[str, str], None]
"""Gets the kind and the key of an object that is new, has changed or is gone; called in kopf's thread."""


def handlers(kinds: Iterable[Resource], access: Access, ring: Ring) -> kopf.OperatorRegistry:
    """All handlers, for ``kopf.operator``."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def log_in(**_: Any) -> kopf.ConnectionInfo:  # noqa: ANN401 - kopf's
        return login(access)

    for kind in kinds:
        _follow(kind, registry, ring)
    return registry


def _follow(kind: Resource, registry: kopf.OperatorRegistry, ring: Ring) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.kind)
    async def changed(name: str, namespace: str | None, **_: Any) -> None:  # noqa: ANN401 - kopf's
        ring(kind.kind, f"{namespace}/{name}" if namespace else name)
