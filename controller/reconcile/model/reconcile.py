# SPDX-License-Identifier: Apache-2.0
"""Model: what to apply, to delete, and to say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.reconcile.plan import Plan

if TYPE_CHECKING:
    from controller.reconcile.model.observed import Observed


def reconcile(observed: Observed, now_s: float) -> Plan:  # noqa: ARG001 - filled in by the next commit
    """``now_s``: seconds since the epoch."""
    return Plan()
