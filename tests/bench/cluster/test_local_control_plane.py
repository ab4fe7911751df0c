# SPDX-License-Identifier: Apache-2.0
"""When a control plane's parts are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from bench.cluster.local_control_plane import _HasAccounts
from controller.kube.errors import Unreachable

if TYPE_CHECKING:
    from controller.kube.client import Client


class Answers:
    """An API server that answers what it is given, one after the other."""

    def __init__(self, *found: object) -> None:
        self._found = list(found)

    async def get_or_none(self, *_: object) -> Any:  # noqa: ANN401 - an object of any kind, or None
        answer = self._found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def has_accounts(*found: object) -> bool:
    return await _HasAccounts(cast("Client", Answers(*found)))()


async def test_an_answer_that_is_late_is_asked_for_again() -> None:
    assert not await has_accounts(Unreachable("late"))
    assert not await has_accounts({}, Unreachable("late"))


async def test_the_controllers_work_once_there_is_an_account() -> None:
    assert not await has_accounts(None)
    assert not await has_accounts({}, None)
    assert await has_accounts({}, {})
