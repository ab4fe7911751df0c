# SPDX-License-Identifier: Apache-2.0
"""One InferencePool and its pods as the directory of an extproc behind any gateway.

What cannot be used, or is gone, changes nothing: the last pool and the last EndpointPickerConfig that could be used
stay, and pods are followed by them, because the gateway goes on sending requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.pools import KIND, server_of
from controller.gateway.compile.servers import picker_file_name, picker_of
from controller.gateway.compile.sources import source_of
from extproc.api.picker_config import check_shape_alone
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.picker_config import PickerCheck

OBJECTIVES: Final = "InferenceObjective"
# Objectives of the group llm-d.ai, which have precedence over those of the older group.
LLM_D_OBJECTIVES: Final = "InferenceObjective.llm-d.ai"
# Asking for usage adds a chunk to streams, which our own bundle keeps from clients that did not ask; other gateways do
# not.
_FIELDS: Final = MappingProxyType({"streamUsage": "AsRequested"})


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with a pool, in the form of a condition that is False."""

    reason: str
    message: str


class PickerOutcome(msgspec.Struct, frozen=True):
    """``files``: the whole directory; None while there is nothing to serve. ``problems``: what somebody should look
    at.
    """

    files: Mapping[str, bytes] | None
    problems: tuple[Problem, ...]
    endpoints: int = 0
    ready: int = 0


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
        self._fields = {**_FIELDS, **fields}
        self._picker_config = picker_config
        self._check_picker = check_picker
        self._compiler = Compiler(check_picker=check_picker)
        self._objectives: dict[str, dict[str, Mapping[str, Any]]] = {OBJECTIVES: {}, LLM_D_OBJECTIVES: {}}
        # what the pool says, and the last of it that could be used
        self._wanted: Mapping[str, Any] | None = None
        self._server: Mapping[str, Any] | None = None
        self._pool_problem: Problem | None = Problem("PoolNotFound", f"there is no InferencePool {pool}")
        self._pickers: set[str] = set()
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
        else:
            self._compiler.put(kind, key, thing)

    def compile(self) -> PickerOutcome:
        """What the objects come to."""
        problems = [] if self._pool_problem is None else [self._pool_problem]
        problems += self._adopt()
        outcome = self._compiler.compile()
        status = outcome.statuses.get(("ModelServer", self._pool))
        if status is None:
            return PickerOutcome(None, tuple(problems))
        # whether it is programmed follows from the others
        failed = [one for one in status.conditions if one.status == "False" and one.type != "Programmed"]
        problems += [Problem(one.reason, one.message) for one in failed]
        # a process that starts waits for the EndpointPickerConfig that it is to run, rather than pick by another one
        if any(one.type in {"Programmed", "ResolvedRefs"} and one.status == "False" for one in status.conditions):
            return PickerOutcome(None, tuple(problems))
        others = {picker_file_name(key) for key in self._pickers - {self._picker_of(self._server)}}
        files = {name: content for name, content in outcome.files.items() if name not in others}
        return PickerOutcome(files, tuple(problems), status.fields["endpoints"], status.fields["ready"])

    def _adopt(self) -> Iterator[Problem]:
        """Use what the pool says, unless that would be worse than what is in use."""
        picker = self._picker_of(self._wanted)
        if self._server is not None and picker and picker not in self._pickers:
            said = f"ConfigMap {picker} holds no usable EndpointPickerConfig, or is not there; the pool of before stays"
            yield Problem("PickerConfigNotFound", said)
            return
        if self._wanted is not self._server and self._wanted is not None:
            self._server = self._wanted
            self._compiler.put("ModelServer", self._pool, self._wanted)
        if picker in self._troubled and picker in self._pickers:
            said = f"the EndpointPickerConfig of before stays; ConfigMap {picker}: {self._troubled[picker]}"
            yield Problem("PickerConfigNotFound", said)

    def _put_pool(self, pool: Mapping[str, Any] | None) -> None:
        if pool is None:
            kept = "; its pods are followed as it said last" if self._server is not None else ""
            self._pool_problem = Problem("PoolNotFound", f"there is no InferencePool {self._pool}{kept}")
            return
        named = None if self._picker_config is None else self._picker_config.partition("/")[2]
        found = server_of(pool, prefix="", picker_config=named, fields=self._fields)
        complaint = found.complaint if found.server is None else source_of(found.server).complaint()
        if found.server is None or complaint:
            self._pool_problem = Problem("PoolInvalid", complaint)
            return
        self._pool_problem, self._wanted = None, found.server

    def _picker_of(self, server: Mapping[str, Any] | None) -> str:
        """``namespace/name`` of the ConfigMap that it names, empty if it names none."""
        name = "" if server is None else server["spec"].get("pickerConfig", "")
        return object_key(namespace_of(self._pool), name) if name else ""

    def _put_picker(self, key: str, thing: Mapping[str, Any] | None) -> None:
        problem = "is gone" if thing is None else picker_of(key, thing, self._check_picker).problem
        if problem:
            self._troubled[key] = problem
        else:
            self._troubled.pop(key, None)
            self._pickers.add(key)
            self._compiler.put("ConfigMap", key, thing)

    def _put_objective(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        of_pool = thing is not None and _pool_of(thing) == self._pool
        if thing is None or not of_pool:
            self._objectives[kind].pop(key, None)
        else:
            self._objectives[kind][key] = thing
        self._compiler.put(
            OBJECTIVES, key, self._objectives[LLM_D_OBJECTIVES].get(key) or self._objectives[OBJECTIVES].get(key)
        )


def _pool_of(objective: Mapping[str, Any]) -> str:
    """The pool that an objective refers to, which is of its own namespace."""
    namespace = objective["metadata"].get("namespace", "default")
    name = ((objective.get("spec") or {}).get("poolRef") or {}).get("name", "")
    return f"{namespace}/{name}"
