# SPDX-License-Identifier: Apache-2.0
"""Whether a request's caller may use what it asks for: where access meets routes and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extproc.admission.access import Access, Subject, Wish
from extproc.admission.identity import ANONYMOUS_SUBJECT
from extproc.core.types import Head
from extproc.errors import ModelNotAllowed
from extproc.protocol import MODELS_PATH
from extproc.routing.resolve import RoutingTable

if TYPE_CHECKING:
    from extproc.admission.identity import Identities
    from extproc.routing.resolve import Destination

_SHOWN_CHARACTERS = 100


class WhoMay:
    """The decision by one configuration."""

    def __init__(self, access: Access, identities: Identities, routing: RoutingTable) -> None:
        self._access = access
        self._identities = identities
        self._routing = routing

    def visit(self, head: Head) -> Visit | None:
        """The caller of a request; None if nobody is refused anything."""
        if not self._access.restricts:
            return None
        subject = self._identities.subject(head.headers, head.claims) if head.is_trusted else ANONYMOUS_SUBJECT
        return Visit(self._access, self._routing, subject, head)


class Visit(msgspec.Struct, frozen=True):
    """One request's caller."""

    access: Access
    routing: RoutingTable
    subject: Subject
    head: Head

    def may(self, model: str | None, destination: Destination) -> bool:
        """Whether it may ask for ``model`` there. None: the body's model could not be read."""
        wish = Wish(
            model=model,
            base_model=destination.base_model,
            server=destination.server,
            route=destination.route,
            http_route=self.head.http_route,
            listener=self.head.listener,
        )
        return self.access.may_use(self.subject, wish)

    def may_list(self, model: str) -> bool:
        """Whether some request for ``model`` may go: it is listed, and its name is no secret."""
        return any(self.may(model, one) for one in self.routing.destinations(model, self.head.listener))

    def may_know(self, model: str) -> bool:
        """Whether the caller may be told that ``model`` does not exist.

        Others get the answer for models that they may not use, so that nobody finds models out by asking.
        """
        return self.may_list(model) or self.access.may_use_everything(self.subject)


def not_allowed(model: str | None) -> ModelNotAllowed:
    """The same words whether or not the model exists."""
    if model is None:
        return ModelNotAllowed("The model could not be read from this request, and you may not use every model.")
    return ModelNotAllowed(
        f"The model '{model[:_SHOWN_CHARACTERS]}' does not exist, or you may not use it; "
        f"GET {MODELS_PATH} lists those that you may.",
        param="model",
    )
