# SPDX-License-Identifier: Apache-2.0
"""Whether an object has to be applied again: it is what was applied last, and nobody has changed it since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.plan import without

if TYPE_CHECKING:
    from controller.kube.resources import Object

# A digest of what was applied. Fields that are no longer wanted show by it alone.
APPLIED: Final = "attache.dev/applied"


def stamped(thing: Object) -> Object:
    """With its digest."""
    digest = sha256(msgspec.json.encode(thing, order="sorted")).hexdigest()[:16]
    metadata = {**thing["metadata"], "annotations": {**(thing["metadata"].get("annotations") or {}), APPLIED: digest}}
    return {**thing, "metadata": metadata}


def digest_of(thing: Object) -> str | None:
    """None if it was never stamped."""
    return (thing["metadata"].get("annotations") or {}).get(APPLIED)


def is_settled(wanted: Object, found: Object, yields: Iterable[tuple[str, ...]]) -> bool:
    """``wanted``: stamped. Fields of ``yields`` may have any value: others may own them."""
    wanted = without(wanted, yields)
    owners = [one.get("uid") for one in found["metadata"].get("ownerReferences") or ()]
    is_owned = all(one["uid"] in owners for one in wanted["metadata"].get("ownerReferences") or ())
    metadata = {name: value for name, value in wanted["metadata"].items() if name != "ownerReferences"}
    return is_owned and _covers({**wanted, "metadata": metadata}, found)


def _covers(wanted: object, found: object) -> bool:
    """Whether ``found`` has everything that is wanted; a server adds defaults."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            name in found and _covers(one, found[name]) for name, one in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(found, (list, tuple))
            and len(wanted) == len(found)
            and all(_covers(one, other) for one, other in zip(wanted, found, strict=True))
        )
    return wanted == found
