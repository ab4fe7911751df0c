# SPDX-License-Identifier: Apache-2.0
"""What no schema can say of a ModelInfer: long names, circles, pods without containers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from controller.api.pod_shapes import wrong_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from controller.api.model_infer import ModelInfer, ModelInferSpec, Role

# Of one object: whoever may write one number must not fill the memory of the manager, which works for everybody.
MOST_PODS: Final = 10_000
LONGEST_NAME: Final = 63
_DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
# Groups and replicas may be scaled later, by somebody who cannot change names.
_GROUP_DIGITS: Final = 3
_REPLICA_DIGITS: Final = 2


def mistakes(found: ModelInfer) -> Iterator[str]:
    """Each says what to write instead. Such an object is refused, and nothing is done for one that is there."""
    yield from too_many(found.spec, {one.name: one.replicas for one in found.spec.template.roles})
    yield from _names(found)
    yield from _circles(found)
    for role in found.spec.template.roles:
        for field, template in (("entryTemplate", role.entry_template), ("workerTemplate", role.worker_template)):
            if template is None:
                continue
            if not template.spec.get("containers"):
                yield f"{field} of role {role.name} has no containers"
            yield from wrong_shapes(template.spec, f"{field} of role {role.name}")


def too_many(spec: ModelInferSpec, replicas: Mapping[str, int]) -> Iterator[str]:
    """Whether so many pods are asked for that nothing is done. ``replicas``: of roles, as they are scaled by now."""
    each = sum(replicas.get(one.name, one.replicas) * (1 + one.worker_replicas) for one in spec.template.roles)
    if spec.replicas * each > MOST_PODS:
        yield (
            f"{spec.replicas} groups of {each} pods are {spec.replicas * each}, and one ModelInfer has {MOST_PODS} at "
            "most; ask for fewer replicas, or spread them over several objects"
        )


def _names(found: ModelInfer) -> Iterator[str]:
    name, spec = found.metadata.name, found.spec
    longest = max(spec.template.roles, key=lambda role: len(_suffix(role, spec.replicas)))
    length = len(name) + len(_suffix(longest, spec.replicas))
    if length > LONGEST_NAME:
        yield (
            f"pods of role {longest.name} would have names of {length} characters, and a host name has {LONGEST_NAME} "
            f"at most; use a name or a role's name that is {length - LONGEST_NAME} shorter"
        )
    if any(role.worker_replicas for role in spec.template.roles) and not _DNS_LABEL.fullmatch(name):
        yield (
            f"workers find their entry pod by host names that are made from '{name}'; use a name of lower case letters,"
            " digits and '-' that begins with a letter"
        )


def _suffix(role: Role, replicas: int) -> str:
    """What stands behind the ModelInfer's name in the name of a pod: ``-007-decode-03-1``."""
    return f"-{replicas:0{_GROUP_DIGITS}}-{role.name}-{role.replicas:0{_REPLICA_DIGITS}}-{role.worker_replicas}"


def _circles(found: ModelInfer) -> Iterator[str]:
    """Roles that wait for each other would never start."""
    after = {one.name: one.starts_after for one in found.spec.template.roles}
    started: set[str] = set()
    while ready := [name for name, first in after.items() if name not in started and started.issuperset(first)]:
        started.update(ready)
    waiting = [name for name in after if name not in started]
    if waiting:
        yield f"{', '.join(waiting)} wait for each other by startsAfter, so none of them would start; leave one out"
