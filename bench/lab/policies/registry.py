# SPDX-License-Identifier: Apache-2.0
"""Policies by name, each with the observer and the configuration that it needs."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from bench.lab.policies.policy_file import load_policy, policy_file
from bench.lab.policies.routers import (
    AffinityWithTokenLoad,
    AibrixPrefixCache,
    DynamoKvRouter,
    KthenaDefault,
    KthenaPublished,
    LeastKvCache,
    LeastRequest,
    LMetric,
    Oracle,
    PowerOfTwo,
    PrebleExploitExplore,
    RandomPick,
    RayPrefixAffinity,
    SglangCacheAware,
)
from bench.lab.policies.trackers import (
    EngineCalibration,
    InFlightTracker,
    PolicySetup,
    PrefixMemoryPolicy,
    PrefixMemoryRule,
)
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import installed_plugins
from extproc.scheduling.builtin_pickers import (
    PairParameters,
    PrefillDecodePairs,
    PrefixAware,
    PrefixAwareParameters,
    RoundRobin,
)
from extproc.scheduling.disaggregation import ExpectedSeconds, UncachedTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.scheduling.disaggregation import DisaggregationRule
    from extproc.scheduling.picker import Picker

_CONFIGS: Final = Path(__file__).parent / "configs"


_KV_EVENTS: Final = {"kvEvents": {"port": 5557}}
# The memory of each router; see its module.
_SENT: Final = PrefixMemoryRule()
_UNBOUNDED: Final = PrefixMemoryRule(is_bounded=False)
_ENDED: Final = PrefixMemoryRule(by="ended", is_bounded=False)


def _plain(make: Callable[[], Picker]) -> Callable[[EngineCalibration], PolicySetup]:
    def build(_: EngineCalibration) -> PolicySetup:
        return PolicySetup(make())

    return build


def _tracking_in_flight(
    make: Callable[[InFlightTracker, EngineCalibration], Picker], memory: PrefixMemoryRule | None = None
) -> Callable[[EngineCalibration], PolicySetup]:
    """A policy whose router observes answers. ``memory``: of the prompts that it sent; None: Attaché's index."""

    def build(known: EngineCalibration) -> PolicySetup:
        tracker = InFlightTracker()
        picker = make(tracker, known)
        if memory is not None:
            picker = PrefixMemoryPolicy(picker, tracker, memory, known.block_size)
        return PolicySetup(picker, tracker)

    return build


def _llm_d(file: str) -> Callable[[InFlightTracker, EngineCalibration], Picker]:
    path = _CONFIGS / file
    return lambda _tracker, _known: picker_from_text(str(path), path.read_text(), installed_plugins()).picker


def _configured(
    file: Path, server: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[EngineCalibration], PolicySetup]:
    def build(_: EngineCalibration) -> PolicySetup:
        try:
            picker = picker_from_text(str(file), file.read_text(), installed_plugins()).picker
        except OSError as error:
            msg = (
                f"cannot be read: {error.strerror}; name a Python file as in my.py:Mine, another "
                f"file, or one of {', '.join(POLICIES)}"
            )
            raise ConfigInvalid([Mistake(str(file), 0, "", msg)]) from None
        return PolicySetup(picker, server=server)

    return build


def _ours() -> Picker:
    return PrefixAware(PrefixAwareParameters())


def _preble(tracker: InFlightTracker, known: EngineCalibration) -> Picker:
    return PrebleExploitExplore(
        tracker,
        prefill_tokens_per_s=known.prefill_tokens_per_s,
        decode_s_per_token=known.decode_s_per_token,
        block_size=known.block_size,
    )


def _pairs(decide: DisaggregationRule) -> Callable[[EngineCalibration], PolicySetup]:
    """Prefill and decode engines under ``decide``; what picks them, and what it knows, is ours."""

    def build(_: EngineCalibration) -> PolicySetup:
        roles = PairParameters("", {"role": "prefill"}, {"role": "decode"})
        picker = PrefillDecodePairs(roles, PrefixAware(PrefixAwareParameters()), decide)

        def learn(prefill: str, decode: str, tokens: int, seconds: float) -> None:
            picker.transfers.learn(prefill, decode, tokens=tokens, seconds=seconds)

        return PolicySetup(picker, has_pairs=True, on_transfer=learn)

    return build


POLICIES: Final[Mapping[str, Callable[[EngineCalibration], PolicySetup]]] = MappingProxyType(
    {
        "attache": _plain(_ours),
        "attache-precise": lambda _: PolicySetup(_ours(), server=_KV_EVENTS),
        "round-robin": _plain(RoundRobin),
        "random": _plain(RandomPick),
        "least-request": _plain(LeastRequest),
        "power-of-two": _plain(PowerOfTwo),
        "llm-d-blend": _tracking_in_flight(_llm_d("llm-d-default.yaml"), _SENT),
        "llm-d-token-load": _tracking_in_flight(
            lambda tracker, known: AffinityWithTokenLoad(tracker, known.prefill_tokens_per_s), _SENT
        ),
        "llm-d-precise": _configured(_CONFIGS / "llm-d-precise.yaml", _KV_EVENTS),
        "kthena": _tracking_in_flight(lambda _tracker, _known: KthenaDefault(), _ENDED),
        "kthena-2025-least-request": _plain(KthenaPublished),
        "kthena-2025-prefix": _tracking_in_flight(lambda _tracker, _known: KthenaPublished(prefix="seen"), _ENDED),
        "kthena-2025-kvcache": _tracking_in_flight(
            lambda _tracker, _known: KthenaPublished(prefix="whole"), PrefixMemoryRule(by="events")
        ),
        "sglang": _tracking_in_flight(lambda _tracker, _known: SglangCacheAware(), _UNBOUNDED),
        "dynamo": _tracking_in_flight(
            lambda tracker, known: DynamoKvRouter(tracker, known.block_size), PrefixMemoryRule(by="events")
        ),
        "preble": _tracking_in_flight(_preble, _SENT),
        "aibrix-prefix-cache": _tracking_in_flight(lambda _tracker, _known: AibrixPrefixCache(), _UNBOUNDED),
        "aibrix-least-kv-cache": _plain(LeastKvCache),
        "ray": _tracking_in_flight(lambda _tracker, _known: RayPrefixAffinity(), _UNBOUNDED),
        "lmetric": _tracking_in_flight(lambda tracker, _: LMetric(tracker), _SENT),
        "pd-attache": _pairs(ExpectedSeconds(512)),
        # for strict times per output token
        "pd-attache-strict": _pairs(ExpectedSeconds(512, stall=0.6)),
        # of prefix-based-pd-decider, nonCachedTokens as minUncachedTokens is by default
        "pd-llm-d": _pairs(UncachedTokens(512)),
        # max_local_prefill_length and max_prefill_queue_size as in Dynamo's conditional disaggregation
        "pd-dynamo": _pairs(UncachedTokens(1000, max_waiting=2)),
        "pd-always": _pairs(UncachedTokens(0)),
        "oracle": _tracking_in_flight(lambda tracker, _: Oracle(tracker)),
    }
)


def policy_named(name: str) -> Callable[[EngineCalibration], PolicySetup]:
    """A policy by its name, by its Python file (``my.py:Mine``) or by the path of an EndpointPickerConfig.

    It is called with the calibration of an engine. A file that is not valid raises PolicyFailed or ConfigInvalid then.
    """
    if name in POLICIES:
        return POLICIES[name]
    return load_policy(name) if policy_file(name) is not None else _configured(Path(name))
