# SPDX-License-Identifier: Apache-2.0
"""Any objects: those of other autoscalers are converted, and checked as ours; the others are named."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_policy import AutoscalingPolicy
from controller.convert import kthena, variant_autoscaling
from controller.convert.fields import Converted, Invalid, Object, shaped, title
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS: Final = {"AutoscalingPolicy": AutoscalingPolicy, "AutoscalingPolicyBinding": AutoscalingPolicyBinding}


def convert(objects: Sequence[Object]) -> Converted:
    """Raises Invalid where an object cannot be understood, or has something that ours may not have."""
    variants, policies, warnings = [], [], []
    for thing in objects:
        shaped(thing)
        group, kind = str(thing.get("apiVersion", "")).partition("/")[0], thing.get("kind")
        if group in variant_autoscaling.GROUPS and kind == variant_autoscaling.KIND:
            variants.append((thing, title(thing)))
        elif group == kthena.GROUP and kind in kthena.KINDS:
            policies.append((thing, title(thing)))
        else:
            warnings.append(f"{title(thing)}: left out; it is not a kind that can be converted")
    found = [variant_autoscaling.convert(variants), kthena.convert(policies)]
    made = tuple(thing for one in found for thing in one.objects)
    for thing in made:
        check(thing)
    twice = next((name for name, count in Counter(map(title, made)).items() if count > 1), None)
    if twice is not None:
        raise Invalid(f"{twice}: two of these would be written; convert them one by one, or rename one")
    said = (*(text for one in found for text in one.warnings), *warnings)
    return Converted(made, tuple(dict.fromkeys(said)))


def check(thing: Object) -> None:
    """By our own types; raises Invalid."""
    try:
        msgspec.convert(
            {"metadata": thing["metadata"], "spec": thing["spec"]}, _OURS[thing["kind"]], dec_hook=decode_quantity
        )
    except msgspec.ValidationError as error:
        raise Invalid(f"{title(thing)}: cannot be written here: {error}") from None
