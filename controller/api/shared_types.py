# SPDX-License-Identifier: Apache-2.0
"""What several kinds share: conditions, whole numbers or percentages, templates of pods, names of accelerators."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec

from extproc.api.spec import NonEmpty, Spec, list_map_keys

Replicas = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Percentage = Annotated[str, msgspec.Meta(pattern=r"^(100|[0-9]{1,2})%$", max_length=4)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Utilization = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
# A number of things, or a share of all of them.
IntOrPercent = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | Percentage
# A label of DNS that leaves room for the names that are made from it.
ShortName = Annotated[str, msgspec.Meta(pattern=r"^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$", max_length=20)]
# Of a backend, and of a stage of one.
TargetName = Annotated[str, msgspec.Meta(pattern=r"^[a-z]([-a-z0-9]{0,26}[a-z0-9])?$", max_length=28)]
# Vendor prefixes do not distinguish names.
_VENDORS: Final = frozenset({"amd", "google", "habana", "huawei", "intel", "nvidia"})
_BETWEEN_WORDS: Final = re.compile(r"[-_ ]+")
# Of a command line.
Words = Annotated[tuple[str, ...], msgspec.Meta(max_length=200)]


class Condition(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """One aspect of an object's state, as Kubernetes has it.

    ``type``: the aspect. ``status``: whether it holds. ``reason``: the cause, in one word. ``message``: the cause and
    the remedy, as text. ``observed_generation``: the generation of the object that was observed.
    ``last_transition_time``: when ``status`` last changed.
    """

    type: Annotated[str, msgspec.Meta(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)]
    message: Annotated[str, msgspec.Meta(max_length=32768)]
    last_transition_time: Annotated[datetime, msgspec.Meta(tz=True)]
    observed_generation: Annotated[int, msgspec.Meta(ge=0)] | None = None


Conditions = Annotated[tuple[Condition, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("type"))]


class LayeredSpec(Spec, frozen=True):
    """Written in layers. The API server fills in no defaults: what one layer leaves out may stand in the one below."""


class PodMetadata(Spec, frozen=True):
    """``labels`` and ``annotations``: of the pods, in addition to ours."""

    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class PodTemplate(Spec, frozen=True):
    """``metadata``: of the pods. ``spec``: a PodSpec of Kubernetes; its API server checks it when pods are made."""

    spec: dict[str, Any]
    metadata: PodMetadata = PodMetadata()


class ObjectReference(Spec, frozen=True):
    """An object of the same namespace. ``api_version`` and ``kind``: its type. ``name``: its name."""

    kind: NonEmpty
    name: NonEmpty
    api_version: NonEmpty = "attache.dev/v1alpha1"


class EnvVar(Spec, frozen=True):
    """An environment variable. ``name``: its name. ``value``: its value. ``value_from``: where its value comes from, as
    in a PodSpec.
    """

    name: NonEmpty
    value: str | None = None
    value_from: dict[str, Any] | None = None


def matches_accelerator(name: str, kind: str) -> bool:
    """Whether ``name`` contains all words of ``kind``: NVIDIA-H100-80GB-HBM3 is of the kinds H100, nvidia-h100 and
    h100-80gb.

    Case and vendor are ignored. A name with fewer words does not match: an H100 need not be an H100-80GB.
    """
    return _asked(kind) <= _words(name)


@lru_cache(maxsize=1024)
def _words(name: str) -> frozenset[str]:
    """Of a name. A resource, such as ``nvidia.com/gpu``, is one word."""
    return frozenset(one for one in _BETWEEN_WORDS.split(name.lower()) if one) or frozenset({name})


@lru_cache(maxsize=1024)
def _asked(kind: str) -> frozenset[str]:
    """The words that matter: the vendor only if there is nothing else."""
    return _words(kind) - _VENDORS or _words(kind)
