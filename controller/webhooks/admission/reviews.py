# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview, as an API server sends it, and the answer to it

Source: ``admission.k8s.io/v1`` in ``k8s.io/api/admission/v1/types.go``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

API_VERSION: Final = "admission.k8s.io/v1"
# An API server cuts warnings at 256 characters, and all of them together at 4,096.
_LONGEST_WARNING: Final = 256
_MOST_WARNINGS: Final = 12

Operation = Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
Object = Mapping[str, Any]


class _Kind(msgspec.Struct, frozen=True):
    kind: str


class Review(msgspec.Struct, frozen=True, rename="camel"):
    """What is asked. ``new`` and ``old``: the object after and before; None if there is none."""

    uid: str
    kind: _Kind
    operation: Operation
    name: str = ""
    namespace: str = ""
    new: Object | None = msgspec.field(default=None, name="object")
    old: Object | None = msgspec.field(default=None, name="oldObject")

    @property
    def key(self) -> str:
        """``namespace/name``; the name is missing while the server is still to make one."""
        return f"{self.namespace}/{self.name}"


class Verdict(msgspec.Struct, frozen=True):
    """``refused``: why the object must not be taken, empty if it may be. ``warnings``: what people should know."""

    refused: str = ""
    warnings: tuple[str, ...] = ()


class _AdmissionReview(msgspec.Struct, frozen=True):
    request: Review


_DECODER: Final = msgspec.json.Decoder(_AdmissionReview)


def read_review(body: bytes) -> Review:
    """Raises msgspec.DecodeError if ``body`` is no AdmissionReview."""
    return _DECODER.decode(body).request


def answer(review: Review, verdict: Verdict) -> bytes:
    """The body of the answer."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": not verdict.refused}
    if verdict.refused:
        response["status"] = {"code": 422, "reason": "Invalid", "message": verdict.refused}
    if verdict.warnings:
        response["warnings"] = [_cut(one) for one in verdict.warnings[:_MOST_WARNINGS]]
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_WARNING else f"{text[: _LONGEST_WARNING - 3]}..."
