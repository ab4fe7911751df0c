# SPDX-License-Identifier: Apache-2.0
"""Who may refer to objects of another namespace: ReferenceGrants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.gateway.compile.gateway_api.objects import Grant


class Grants:
    """All ReferenceGrants, as the question whether a reference is allowed."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        # (namespace, group, kind) of the target and (namespace, group, kind) of who refers, to names; "" is all
        self._names: dict[tuple[str, ...], set[str]] = {}
        for grant in grants:
            for source in grant.source:
                for target in grant.to:
                    place = grant.identity.namespace, target.group, target.kind
                    who = source.namespace or "", source.group, source.kind
                    self._names.setdefault((*place, *who), set()).add(target.name)

    def allow(self, source: tuple[str, str, str], target: tuple[str, str, str], name: str) -> bool:
        """Whether ``source`` may refer to ``name`` in ``target``; each is namespace, group and kind."""
        if source[0] == target[0]:
            return True
        names = self._names.get((*target, *source), ())
        return "" in names or name in names
