# SPDX-License-Identifier: Apache-2.0
"""One InferencePool and its pods as the directory of an extproc behind any gateway.

An invalid or deleted pool or EndpointPickerConfig changes nothing: the last valid ones stay, and pods are selected by
them, because the gateway continues to send requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.objects import Read
from controller.gateway.compile.pools import KIND, server_of
from controller.gateway.compile.servers import compile_picker, picker_file_name
from controller.gateway.compile.sources import source_of
from extproc.api.picker_config import check_shape_alone
from extproc.api.spec import NonEmpty, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.picker_config import PickerCheck

OBJECTIVES: Final = "InferenceObjective"
# Objectives of the group llm-d.ai, which have precedence over those of the older group.
LLM_D_OBJECTIVES: Final = "InferenceObjective.llm-d.ai"
# As objectives, of both groups.
REWRITES: Final = "InferenceModelRewrite"
LLM_D_REWRITES: Final = "InferenceModelRewrite.llm-d.ai"
# Requesting usage adds a chunk to streams. Our own bundle removes it for clients that did not request it; other
# gateways do not.
PICKER_FIELDS: Final = MappingProxyType({"streamUsage": "AsRequested"})


class PoolProblem(msgspec.Struct, frozen=True):
    """What is wrong with a pool, in the form of a condition that is False."""

    reason: str
    message: str


class PickerOutcome(msgspec.Struct, frozen=True):
    """``files``: the whole directory; None while there is nothing to serve. ``problems``: reported to the user.
    ``notes``: what of the EndpointPickerConfig has no effect.
    """

    files: Mapping[str, bytes] | None
    problems: tuple[PoolProblem, ...]
    endpoints: int = 0
    ready: int = 0
    notes: tuple[str, ...] = ()


class PickerCompiler:
    """``put`` takes what changed, ``compile`` gives the outcome.

    ``pool`` and ``picker_config`` (of a ConfigMap; None: the pool's annotation may name one): as ``namespace/name``.
    ``fields``: of the ModelServer's spec, unless the pool's annotation has them. The ModelServer has the name of the
    pool.
    ``check_picker``: that of the extproc that reads the directory.
    """

    def __init__(
        self,
        pool: str,
        picker_config: str | None = None,
        fields: Mapping[str, Any] = MappingProxyType({}),
        *,
        check_picker: PickerCheck = check_shape_alone,
    ) -> None:
        self._pool = pool
        self._fields = {**PICKER_FIELDS, **fields}
        self._picker_config = picker_config
        self._check_picker = check_picker
        self._compiler = Compiler(check_picker=check_picker)
        self._objectives: dict[str, dict[str, Mapping[str, Any]]] = {OBJECTIVES: {}, LLM_D_OBJECTIVES: {}}
        self._rewrites: dict[str, dict[str, Mapping[str, Any]]] = {REWRITES: {}, LLM_D_REWRITES: {}}
        self._pool_object: Mapping[str, Any] | None = None
        # the pool as it is, and as it was last usable
        self._wanted: Mapping[str, Any] | None = None
        self._server: Mapping[str, Any] | None = None
        self._pool_problem: PoolProblem | None = PoolProblem("PoolNotFound", f"there is no InferencePool {pool}")
        self._pickers: set[str] = set()
        # what of each of them has no effect
        self._notes: dict[str, tuple[str, ...]] = {}
        # ConfigMaps that cannot be used, or not any more: what is wrong with them
        self._troubled: dict[str, str] = {}

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        """An object as it is now; None: it is gone. Objects of other pools and namespaces are left out."""
        if kind == KIND:
            if key == self._pool:
                self._put_pool(thing)
        elif namespace_of(key) != namespace_of(self._pool):
            return
        elif kind == "ConfigMap":
            self._put_picker(key, thing)
        elif kind in self._objectives:
            self._put_objective(kind, key, thing)
        elif kind in self._rewrites:
            self._put_rewrite(kind, key, thing)
        else:
            self._compiler.update_object(kind, key, thing)

    def compile(self) -> PickerOutcome:
        """The directory and statuses for the current objects."""
        problems = [] if self._pool_problem is None else [self._pool_problem]
        problems += self._adopt()
        outcome = self._compiler.compile()
        status = outcome.statuses.get(("ModelServer", self._pool))
        if status is None:
            return PickerOutcome(None, tuple(problems))
        # whether it is programmed follows from the others
        failed = [one for one in status.conditions if one.status == "False" and one.type != "Programmed"]
        problems += [PoolProblem(one.reason, one.message) for one in failed]
        # a process that starts waits for the EndpointPickerConfig that it is to run, rather than pick by another one
        if any(one.type in {"Programmed", "ResolvedRefs"} and one.status == "False" for one in status.conditions):
            return PickerOutcome(None, tuple(problems))
        others = {picker_file_name(key) for key in self._pickers - {self._picker_of(self._server)}}
        files = {name: content for name, content in outcome.files.items() if name not in others}
        return PickerOutcome(
            files,
            tuple(problems),
            status.fields["endpoints"],
            status.fields["ready"],
            notes=self._notes.get(self._picker_of(self._server), ()),
        )

    def _adopt(self) -> Iterator[PoolProblem]:
        """Use the pool as it is now, unless that would be worse than what is in use."""
        picker = self._picker_of(self._wanted)
        if self._server is not None and picker and picker not in self._pickers:
            message = (
                f"ConfigMap {picker} holds no usable EndpointPickerConfig, or is not there; the pool of before stays"
            )
            yield PoolProblem("PickerConfigNotFound", message)
            return
        if self._wanted is not self._server and self._wanted is not None:
            self._server = self._wanted
            self._compiler.update_object("ModelServer", self._pool, self._wanted)
        if picker in self._troubled and picker in self._pickers:
            message = f"the EndpointPickerConfig of before stays; ConfigMap {picker}: {self._troubled[picker]}"
            yield PoolProblem("PickerConfigNotFound", message)

    def _put_pool(self, pool: Mapping[str, Any] | None) -> None:
        self._pool_object = pool
        if pool is None:
            kept = "; its pods are followed as it said last" if self._server is not None else ""
            self._pool_problem = PoolProblem("PoolNotFound", f"there is no InferencePool {self._pool}{kept}")
            return
        named = None if self._picker_config is None else self._picker_config.partition("/")[2]
        found = server_of(pool, prefix="", picker_config=named, fields={**self._fields, **self._rewrite_fields()})
        complaint = found.complaint if found.server is None else source_of(found.server).complaint()
        if found.server is None or complaint:
            self._pool_problem = PoolProblem("PoolInvalid", complaint)
            return
        self._pool_problem, self._wanted = None, found.server

    def _picker_of(self, server: Mapping[str, Any] | None) -> str:
        """``namespace/name`` of the ConfigMap that it names, empty if it names none."""
        name = "" if server is None else server["spec"].get("pickerConfig", "")
        return object_key(namespace_of(self._pool), name) if name else ""

    def _put_picker(self, key: str, thing: Mapping[str, Any] | None) -> None:
        picker = None if thing is None else compile_picker(key, thing, self._check_picker)
        if picker is None or picker.problem:
            self._troubled[key] = "is gone" if picker is None else picker.problem
        else:
            self._troubled.pop(key, None)
            self._notes[key] = tuple(picker.notes)
            self._pickers.add(key)
            self._compiler.update_object("ConfigMap", key, thing)

    def _put_rewrite(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        if thing is None or _pool_of(thing) != self._pool:
            if self._rewrites[kind].pop(key, None) is None:
                return
        else:
            self._rewrites[kind][key] = thing
        if self._pool_object is not None:
            self._put_pool(self._pool_object)

    def _rewrite_fields(self) -> dict[str, Any]:
        found = model_rewrites({**self._rewrites[REWRITES], **self._rewrites[LLM_D_REWRITES]}.values())
        return {"modelRewrites": found} if found else {}

    def _put_objective(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        of_pool = thing is not None and _pool_of(thing) == self._pool
        if thing is None or not of_pool:
            self._objectives[kind].pop(key, None)
        else:
            self._objectives[kind][key] = thing
        self._compiler.update_object(
            OBJECTIVES, key, self._objectives[LLM_D_OBJECTIVES].get(key) or self._objectives[OBJECTIVES].get(key)
        )


class _Rewritten(Read, frozen=True):
    model_rewrite: NonEmpty
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None


class _AskedModel(Read, frozen=True):
    value: str = ""


class _RewriteMatch(Read, frozen=True):
    model: _AskedModel | None = None


class _RewriteRule(Read, frozen=True):
    targets: Annotated[list[_Rewritten], msgspec.Meta(min_length=1, max_length=64)]
    matches: list[_RewriteMatch | None] | None = None


def model_rewrites(objects: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """InferenceModelRewrites as a ModelServer has them, in the order in which they count.

    Rules for one model come before those for all, then the older object's, then the first of an object. Where some
    targets have weights, only those are drawn. A rule of another shape is left out: the others of the pool hold.
    """
    rules = [rule for one in sorted(objects, key=_age) for rule in _rules_of(one)]
    exact, generic = [], []
    for rule in rules:
        weighted = [one for one in rule.targets if one.weight]
        targets = [{"model": one.model_rewrite, "weight": one.weight or 1} for one in weighted or rule.targets]
        named = [one.model.value if one and one.model else "" for one in rule.matches or ()]
        if all(named) and named:
            exact.append({"models": named, "targets": targets})
        else:
            generic.append({"targets": targets})
    return [*exact, *generic]


def _rules_of(thing: Mapping[str, Any]) -> Iterator[_RewriteRule]:
    spec = thing.get("spec")
    rules = spec.get("rules") if isinstance(spec, dict) else None
    for one in rules if isinstance(rules, list) else ():
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(one, _RewriteRule)


def _age(thing: Mapping[str, Any]) -> tuple[str, str]:
    metadata = thing["metadata"]
    return metadata.get("creationTimestamp") or "", metadata["name"]


def _pool_of(objective: Mapping[str, Any]) -> str:
    """The pool that an objective refers to, which is of its own namespace."""
    namespace = objective["metadata"].get("namespace", "default")
    spec = objective.get("spec")
    reference = spec.get("poolRef") if isinstance(spec, dict) else None
    name = reference.get("name", "") if isinstance(reference, dict) else ""
    return f"{namespace}/{name}"
