# SPDX-License-Identifier: Apache-2.0
"""Targets whose replicas stay for a while as somebody else has set them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.autoscaler.reconciler.bindings import hold_of, is_changed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.autoscaler.reconciler.bindings import BindingView, Hold
    from controller.autoscaler.reconciler.resolver import Resolved


class Holds:
    """Of all bindings: remembers when each change was noticed."""

    def __init__(self) -> None:
        self._noticed: dict[tuple[str, str], float] = {}

    def of(self, view: BindingView, resolved: Sequence[Resolved], hold_s: float, now_s: float) -> Mapping[str, Hold]:
        """By target. ``hold_s``: how long a change is honoured."""
        found: dict[str, Hold] = {}
        for one in resolved:
            place = (view.key, one.spec.name)
            if one.found is None or not is_changed(one.found, view.claim):
                self._noticed.pop(place, None)
                continue
            noticed_at_s = self._noticed.setdefault(place, now_s)
            hold = hold_of(one.found, view.claim, noticed_at_s, hold_s, now_s)
            if hold is not None:
                found[one.spec.name] = hold
        return found

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._noticed = {place: at_s for place, at_s in self._noticed.items() if place[0] != key}
