# SPDX-License-Identifier: Apache-2.0
"""Reviews by the API server are kept for seconds, and a refusal is never taken for consent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from controller.kube.authorizer import ACCESS_REVIEWS, NonResourceAccess, RequestAuthorizer, ResourceAccess, User
from controller.kube.errors import Unreachable

if TYPE_CHECKING:
    from controller.kube.client import Client


class Server:
    """Knows the token ``good``; ``scraper`` may do everything."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.is_away = False

    async def create(self, resource: object, thing: dict[str, Any]) -> dict[str, Any]:
        if self.is_away:
            raise Unreachable("away")
        spec = thing["spec"]
        self.asked.append(spec)
        if resource == ACCESS_REVIEWS:
            return {"status": {"allowed": spec["user"] == "scraper", "denied": False}}
        known = spec["token"] == "good"  # noqa: S105 - a test's
        return {"status": {"authenticated": known, "user": {"username": "scraper", "groups": ["a"]} if known else {}}}


async def test_answers_are_kept_for_seconds() -> None:
    server, now = Server(), [100.0]
    callers = RequestAuthorizer(cast("Client", server), lambda: now[0])
    for _ in range(3):
        user = await callers.user_of("Bearer good")
        assert user == User("scraper", ("a",))
        assert await callers.is_allowed(user, NonResourceAccess("get", "/metrics"))
    assert len(server.asked) == 2
    now[0] += 11.0
    assert await callers.user_of("Bearer good")
    assert len(server.asked) == 3
    now[0] += 11.0
    server.is_away = True
    with pytest.raises(Unreachable):
        await callers.user_of("Bearer good")


async def test_who_has_no_good_token_is_nobody() -> None:
    server = Server()
    callers = RequestAuthorizer(cast("Client", server), lambda: 0.0)
    for header in ("", "Bearer", "Bearer ", "Basic good", "Bearer " + "x" * 20_000):
        assert await callers.user_of(header) is None
    assert server.asked == []
    assert await callers.user_of("bearer bad") is None
    assert await callers.user_of("bearer bad") is None
    assert len(server.asked) == 1


async def test_the_right_is_asked_for_by_what_is_done() -> None:
    server = Server()
    callers = RequestAuthorizer(cast("Client", server), lambda: 0.0)
    action = ResourceAccess("list", "external.metrics.k8s.io", "wva_desired_replicas", "shop")
    assert not await callers.is_allowed(User("stranger"), action)
    assert not await callers.is_allowed(User("stranger"), action)
    (asked,) = server.asked
    assert asked["resourceAttributes"]["namespace"] == "shop"
    # always allowed, in every cluster
    assert await callers.is_allowed(User("admin", ("system:masters",)), action)
    assert len(server.asked) == 1
