# SPDX-License-Identifier: Apache-2.0
"""One expression of a Kubernetes label selector, wherever such selectors stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


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
