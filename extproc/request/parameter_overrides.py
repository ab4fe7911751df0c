# SPDX-License-Identifier: Apache-2.0
"""What a rule sets in the bodies of requests, and what it limits.

A body is changed before it is read for the decision, so limits, guards and engines see the same. Only bodies of APIs
that write an answer are changed. An API that has its parameters in an object, as ``/v1/generate`` has in
``sampling_params``, gets them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.request.inference_request import ABSENT, is_given
from extproc.request.json_rewrite import raw_top_level_fields
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.request.inference_request import InferenceRequest

# Of completions without a limit.
_USUAL_TOKENS: Final = 16
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Overrides(msgspec.Struct, frozen=True):
    """``fields``: names with values in JSON. ``max_output_tokens``: of each answer, None: as clients ask."""

    fields: tuple[tuple[str, bytes], ...] = ()
    max_output_tokens: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """For people."""
        return (*(name for name, _ in self.fields), *(("maxOutputTokens",) if self.max_output_tokens else ()))


def override_changes(overrides: Overrides, request: InferenceRequest, body: bytes) -> dict[str, msgspec.Raw]:
    """The fields at the top of ``body`` that become others; none if nothing does."""
    api = request.api
    if api is None or api.spec.body != "json" or not api.spec.limits:
        return {}
    fields = raw_top_level_fields(body, request.contents)
    holder, _, _ = api.spec.limits[0].rpartition(".")
    given = _members.decode(fields[holder]) if holder else fields
    found = {name: msgspec.Raw(value) for name, value in overrides.fields if given.get(name) != msgspec.Raw(value)}
    for name, most in lowered_token_limits(api, given, overrides.max_output_tokens).items():
        found[name] = msgspec.Raw(b"%d" % most)
    if not holder or not found:
        return found
    return {holder: msgspec.Raw(msgspec.json.encode({**given, **found}))}


def lowered_token_limits(api: Api, given: Mapping[str, msgspec.Raw], most: int | None) -> dict[str, int]:
    """The limits of an answer's tokens that become ``most``; none if the client asks for no more. ``given``: the
    client's fields where the API has its limits.
    """
    if most is None:
        return {}
    names = [name.rpartition(".")[2] for name in api.spec.limits]
    limits = {name: int(msgspec.json.decode(given[name])) for name in names if is_given(given.get(name, ABSENT))}
    if not limits and api is Api.COMPLETIONS and most >= _USUAL_TOKENS:
        return {}
    # engines that have no limit take the last one
    return {name: most for name, value in (limits or {names[-1]: most + 1}).items() if value > most}
