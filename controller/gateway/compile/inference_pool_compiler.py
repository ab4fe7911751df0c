# SPDX-License-Identifier: Apache-2.0
"""One InferencePool and its pods as the directory of an extproc behind any gateway.

An invalid or deleted pool or EndpointPickerConfig changes nothing: the last valid ones stay, and pods are selected by
them, because the gateway continues to send requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.resource_types import ResourceStruct
from controller.gateway.compile.inference_pools import KIND, PoolModelServer, server_from_pool
from controller.gateway.compile.model_servers import compile_picker, picker_file_name
from controller.gateway.compile.source_objects import decode_source
from extproc.api.picker_config import accept_any_plugins
from extproc.api.spec import NonEmpty, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from extproc.api.picker_config import PickerConfigChecker

OBJECTIVES: Final = "InferenceObjective"
# Objectives of the group llm-d.ai, which have precedence over those of the older group.
LLM_D_OBJECTIVES: Final = "InferenceObjective.llm-d.ai"
# As objectives, of both groups.
REWRITES: Final = "InferenceModelRewrite"
LLM_D_REWRITES: Final = "InferenceModelRewrite.llm-d.ai"
# As many as a ModelServer takes.
_MOST_REWRITES: Final = 1000
_MOST_COMPLAINTS: Final = 5
# Requesting usage adds a chunk to streams. Our own bundle removes it for clients that did not request it; other
# gateways do not.
PICKER_FIELDS: Final = MappingProxyType({"streamUsage": "AsRequested"})


class PoolProblem(msgspec.Struct, frozen=True):
    """What is wrong with a pool, in the form of a condition that is False."""

    reason: str
    message: str


class InferencePoolResult(msgspec.Struct, frozen=True):
    """``files``: the whole directory; None while there is nothing to serve. ``problems``: reported to the user.
    ``notes``: what of the EndpointPickerConfig has no effect.
    """

    files: Mapping[str, bytes] | None
    problems: tuple[PoolProblem, ...]
    endpoints: int = 0
    ready: int = 0
    notes: tuple[str, ...] = ()


class InferencePoolCompiler:
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
        check_picker: PickerConfigChecker = accept_any_plugins,
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
        self._rewrite_problem: PoolProblem | None = None
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

    def compile(self) -> InferencePoolResult:
        """The directory and statuses for the current objects."""
        problems = [one for one in (self._pool_problem, self._rewrite_problem) if one is not None]
        problems += self._adopt()
        outcome = self._compiler.compile()
        status = outcome.statuses.get(("ModelServer", self._pool))
        if status is None:
            return InferencePoolResult(None, tuple(problems))
        # whether it is programmed follows from the others
        failed = [one for one in status.conditions if one.status == "False" and one.type != "Programmed"]
        problems += [PoolProblem(one.reason, one.message) for one in failed]
        # a process that starts waits for the EndpointPickerConfig that it is to run, rather than pick by another one
        if any(one.type in {"Programmed", "ResolvedRefs"} and one.status == "False" for one in status.conditions):
            return InferencePoolResult(None, tuple(problems))
        others = {picker_file_name(key) for key in self._pickers - {self._picker_of(self._server)}}
        files = {name: content for name, content in outcome.files.items() if name not in others}
        return InferencePoolResult(
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
        rewrites, complaints = model_rewrites({**self._rewrites[REWRITES], **self._rewrites[LLM_D_REWRITES]}.values())
        found = self._server_of(pool, {"modelRewrites": rewrites} if rewrites else {})
        if found.server is None and rewrites:
            # whoever writes rewrites must not be able to stop the pool
            complaints.append(f"none is used: {found.complaint}")
            found = self._server_of(pool, {})
        self._rewrite_problem = PoolProblem("ModelRewriteInvalid", _shortened(complaints)) if complaints else None
        if found.server is None:
            self._pool_problem = PoolProblem("PoolInvalid", found.complaint)
            return
        self._pool_problem, self._wanted = None, found.server

    def _server_of(self, pool: Mapping[str, Any], rewrites: Mapping[str, Any]) -> PoolModelServer:
        """Without a server if its spec is invalid, too."""
        named = None if self._picker_config is None else self._picker_config.partition("/")[2]
        found = server_from_pool(pool, prefix="", picker_config=named, fields={**self._fields, **rewrites})
        complaint = "" if found.server is None else decode_source(found.server).mistakes_text()
        return PoolModelServer(None, complaint) if complaint else found

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

    def _put_objective(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        of_pool = thing is not None and _pool_of(thing) == self._pool
        if thing is None or not of_pool:
            self._objectives[kind].pop(key, None)
        else:
            self._objectives[kind][key] = thing
        self._compiler.update_object(
            OBJECTIVES, key, self._objectives[LLM_D_OBJECTIVES].get(key) or self._objectives[OBJECTIVES].get(key)
        )


class _Rewritten(ResourceStruct, frozen=True):
    model_rewrite: NonEmpty
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None


class _AskedModel(ResourceStruct, frozen=True):
    value: NonEmpty
    type: Literal["Exact"] | None = None


class _RewriteMatch(ResourceStruct, frozen=True):
    model: _AskedModel


class _RewriteRule(ResourceStruct, frozen=True):
    targets: Annotated[list[_Rewritten], msgspec.Meta(min_length=1, max_length=64)]
    matches: Annotated[list[_RewriteMatch], msgspec.Meta(max_length=1000)] | None = None


def model_rewrites(objects: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """InferenceModelRewrites as a ModelServer has them, in the order in which they count; and what of them is not used
    as it is written.

    Rules for one model come before those for all, then the older object's, then the first of an object. Where some
    targets have weights, only those are drawn. A rule of another shape is left out: the others of the pool hold.
    """
    exact: list[dict[str, Any]] = []
    generic: list[dict[str, Any]] = []
    complaints = []
    for place, rule in _rules_of(sorted(objects, key=_age)):
        if isinstance(rule, str):
            complaints.append(f"{place} is left out: {rule}")
            continue
        weighted = [one for one in rule.targets if one.weight]
        targets = [{"model": one.model_rewrite, "weight": one.weight or 1} for one in weighted or rule.targets]
        if not weighted and any(one.weight == 0 for one in rule.targets):
            complaints.append(f"{place}: no target has a weight above 0, so that all are drawn alike; write weights")
        elif 0 < len(weighted) < len(rule.targets):
            complaints.append(f"{place}: targets without a weight above 0 are not drawn; give each one, or none")
        if rule.matches:
            exact.append({"models": [one.model.value for one in rule.matches], "targets": targets})
        else:
            generic.append({"targets": targets})
    found = [*exact, *generic]
    if len(found) > _MOST_REWRITES:
        complaints.append(f"{len(found) - _MOST_REWRITES} rules beyond {_MOST_REWRITES} are left out; merge some")
    return found[:_MOST_REWRITES], complaints


def _rules_of(objects: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, _RewriteRule | str]]:
    """Where each rule stands, and the rule or what is wrong with it."""
    for thing in objects:
        name, rules = f"{REWRITES} {thing['metadata']['name']}", thing["spec"].get("rules")
        if not isinstance(rules, list):
            yield name, "spec.rules is no list"
            continue
        for number, one in enumerate(rules):
            try:
                yield f"{name}, rules[{number}]", msgspec.convert(one, _RewriteRule)
            except msgspec.ValidationError as error:
                yield f"{name}, rules[{number}]", str(error)


def _shortened(complaints: Sequence[str]) -> str:
    """An Event's message is short."""
    more = len(complaints) - _MOST_COMPLAINTS
    return "; ".join([*complaints[:_MOST_COMPLAINTS], *([f"and {more} more"] if more > 0 else [])])


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
