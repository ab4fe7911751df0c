# SPDX-License-Identifier: Apache-2.0
"""Who may read which decisions at KEDA's port; pure.

A request names a namespace, and nothing in KEDA's protocol proves that the caller may speak for it. So it is believed
of whoever reaches the port, unless namespaces or names of certificates are listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec


class Readers(msgspec.Struct, frozen=True):
    """``namespaces``: whose decisions are told at all; empty: those of all. ``clients``: by a name in a client's
    certificate, the namespaces that it may ask for; none of them: all. Without ``clients``, certificates need no name.
    """

    namespaces: frozenset[str] = frozenset()
    clients: Mapping[str, frozenset[str]] = {}

    def refusal(self, names: Collection[str], namespace: str) -> str:
        """Why a caller must not ask about a namespace, and what to do; empty if it may. ``names``: in its
        certificate.
        """
        if self.namespaces and namespace not in self.namespaces:
            return (
                f"decisions of the namespace {namespace} are not told here; start attache manager with --keda-namespace"
                f" {namespace}"
            )
        if not self.clients:
            return ""
        known = [self.clients[one] for one in names if one in self.clients]
        if not known:
            said = ", ".join(sorted(names)[:5]) or "none"
            return f"no --keda-client-name of attache manager is in the client's certificate, whose names are: {said}"
        if not any(not one or namespace in one for one in known):
            return f"this client's certificate is not for the namespace {namespace}; add that to its --keda-client-name"
        return ""


def readers_of(namespaces: Iterable[str], clients: Iterable[str]) -> Readers:
    """``clients``: each is ``NAME`` or ``NAME=NAMESPACE,NAMESPACE``. Raises ValueError."""
    found: dict[str, frozenset[str]] = {}
    for text in clients:
        name, sign, said = text.partition("=")
        its = frozenset(one.strip() for one in said.split(",")) if sign else frozenset[str]()
        if not name or "" in its:
            raise ValueError(f"{text!r}: write NAME, or NAME=NAMESPACE,NAMESPACE")
        if name in found:
            raise ValueError(f"{name!r} is there twice; write all of its namespaces together")
        found[name] = its
    return Readers(frozenset(namespaces), found)
