# SPDX-License-Identifier: Apache-2.0
"""A manager in virtual time: looks at what changed, performs plans, and can be killed between any two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.cluster.fake.answers import Refused
from bench.cluster.virtual.caches import Caches
from bench.cluster.virtual.clock import rfc3339
from bench.cluster.virtual.effects import differ, perform, with_times
from bench.cluster.virtual.looks import WATCHED, Around, observed
from controller.kube.plan import Action, Plan
from controller.kube.resources import MODEL_INFERS, NODES, Resource, key_of
from controller.models.model_infer.observed import Observed, PodGroups

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.cluster.fake.storage import Change
    from bench.cluster.virtual.clock import Clock
    from bench.cluster.virtual.faults import Faults
    from bench.cluster.virtual.requests import Requests
    from bench.cluster.virtual.server import Server

Reconcile = "Callable[[Observed, float], Plan]"
_LOADS_EACH_S: Final = 1.0
_SOONEST_S: Final = 0.05


class Look(msgspec.Struct, frozen=True):
    """One decision, and what it was made from."""

    at_s: float
    observed: Observed
    plan: Plan


class Witness(Protocol):
    """Sees whatever a manager does."""

    def looked(self, look: Look) -> None:
        """A decision was made."""
        ...

    def acting(self, look: Look, action: Action, /) -> None:
        """An action is about to have its effect."""
        ...

    def wrote_status(self, key: str, /) -> None:
        """A status was written, which was another before."""
        ...


class Manager:
    """``start`` lists all objects and looks at all ModelInfers; ``kill`` forgets everything."""

    def __init__(
        self,
        server: Server,
        clock: Clock,
        faults: Faults,
        requests: Requests,
        reconcile: Callable[[Observed, float], Plan],
        witness: Witness,
        *,
        gang: PodGroups = PodGroups(),  # noqa: B008 - frozen
        has_room: bool = True,
    ) -> None:
        self._server, self._clock, self._faults = server, clock, faults
        self._requests, self._reconcile, self._witness = requests, reconcile, witness
        self._gang, self._has_room = gang, has_room
        self._life = 0
        self._caches: Caches | None = None
        self._keys: dict[str, _Key] = {}
        self._calls_left: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is one."""
        return self._caches is not None

    def start(self) -> None:
        """A new one, if there is none."""
        if self._caches is None:
            self._caches = Caches(self._server, self._clock, WATCHED, self._faults.lag, self._changed)
            for thing in self._caches.all(MODEL_INFERS):
                self._wake(key_of(thing), 0.0)

    def kill(self) -> None:
        """It is gone, whatever it was doing."""
        if self._caches is not None:
            self._caches.close()
        self._caches = None
        self._life += 1
        self._keys.clear()
        self._calls_left = None

    def kill_after(self, calls: int, back_after_s: float) -> None:
        """Kill it after so many more calls, or in the middle of the next; another starts that much later."""
        self._calls_left = calls
        life = self._life
        # a manager with nothing to do dies as well
        self._clock.after(60.0, lambda: self._die(life))
        self._back_after_s = back_after_s

    def _die(self, life: int) -> None:
        if life == self._life and self._calls_left is not None:
            self.kill()
            self._clock.after(self._back_after_s, self.start)

    def _changed(self, change: Change) -> None:
        """Wake whoever the changed object may matter to."""
        assert self._caches is not None
        thing = change.after or change.before
        assert thing is not None
        if change.place == ("", NODES.plural):
            keys = [key_of(one) for one in self._caches.all(MODEL_INFERS)]
        elif change.place[1] == MODEL_INFERS.plural:
            keys = [key_of(thing)]
        else:
            metadata = thing["metadata"]
            keys = [f"{metadata['namespace']}/{one['name']}" for one in metadata.get("ownerReferences") or ()]
        for key in keys:
            self._wake(key, 0.01)

    def _wake(self, key: str, delay_s: float) -> None:
        """Look at ``key`` then, or earlier."""
        own = self._keys.setdefault(key, _Key())
        at_s = self._clock.now_s + delay_s
        if own.is_busy:
            own.is_dirty = True
            return
        if own.looks_at_s is not None and own.looks_at_s <= at_s:
            return
        own.looks_at_s, life = at_s, self._life
        self._clock.after(delay_s, lambda: self._due(key, life, at_s))

    def _due(self, key: str, life: int, at_s: float) -> None:
        own = self._keys.get(key)
        if life == self._life and own is not None and own.looks_at_s == at_s:
            own.looks_at_s = None
            self._look(key, own)

    def _look(self, key: str, own: _Key) -> None:
        caches = self._caches
        assert caches is not None
        if own.not_before_s > self._clock.now_s:
            self._wake(key, own.not_before_s - self._clock.now_s)
            return
        # what was written must be seen first; its event wakes this key again
        own.expected = [(resource, at) for resource, at in own.expected if not caches.has_seen(resource, at)]
        thing = caches.find(MODEL_INFERS, key)
        if own.expected or thing is None:
            return
        asked = own.asks_loads_of
        around = Around(self._requests.loads(asked), asked, self._gang, has_room=self._has_room)
        seen = observed(thing, caches, around, self._clock.now_s)
        look = Look(self._clock.now_s, seen, self._reconcile(seen, self._clock.now_s))
        self._witness.looked(look)
        own.is_busy = True
        self._perform(key, own, look, 0)

    def _perform(self, key: str, own: _Key, look: Look, number: int) -> None:
        """Call for one action after the other, then write the status."""
        plan = look.plan
        if number < len(plan.actions):
            action = plan.actions[number]
            self._call(own, lambda: self._act(look, action), lambda: self._perform(key, own, look, number + 1), key)
        elif plan.status is not None and differ(look.observed.thing.get("status") or {}, plan.status):
            self._call(own, lambda: self._write_status(look), lambda: self._finish(key, own, look.plan), key)
        else:
            self._finish(key, own, plan)

    def _call(self, own: _Key, effect: Callable[[], Resource | None], then: Callable[[], None], key: str) -> None:
        life = self._life
        self._clock.after(self._faults.rng.uniform(0.002, 0.03), lambda: self._arrives(own, effect, then, key, life))

    def _arrives(
        self, own: _Key, effect: Callable[[], Resource | None], then: Callable[[], None], key: str, life: int
    ) -> None:
        """The server gets a call."""
        if life != self._life:
            return
        fate = self._faults.fate()
        dies = self._is_last_call()
        if dies and self._faults.rng.random() < 0.5:
            self._die(life)
            return
        if fate == "refused":
            self._fail(key, own)
            return
        try:
            resource = effect()
        except Refused:
            fate, resource = "refused", None
        if dies:
            self._die(life)
            return
        if resource is not None:
            own.expected.append((resource, self._server.storage.version))
        if fate == "done":
            own.failures = 0
            then()
        else:
            self._fail(key, own)

    def _is_last_call(self) -> bool:
        if self._calls_left is None:
            return False
        self._calls_left -= 1
        return self._calls_left < 0

    def _act(self, look: Look, action: Action) -> Resource | None:
        """The kind that was written; None if nothing had to be."""
        self._witness.acting(look, action)
        before = self._server.storage.version
        perform(self._server, action)
        return action.resource if self._server.storage.version > before else None

    def _write_status(self, look: Look) -> Resource | None:
        thing = look.observed.thing
        now = self._server.find(MODEL_INFERS, key_of(thing))
        if now is None or now["metadata"]["uid"] != thing["metadata"]["uid"] or look.plan.status is None:
            return None
        before = self._server.storage.version
        status = with_times(look.plan.status, now.get("status") or {}, rfc3339(self._clock.now_s))
        self._server.set_status(MODEL_INFERS, now, status)
        if self._server.storage.version == before:
            return None
        self._witness.wrote_status(key_of(thing))
        return MODEL_INFERS

    def _finish(self, key: str, own: _Key, plan: Plan) -> None:
        own.is_busy = False
        asks = plan.asks_loads_of
        is_new = not asks <= own.asks_loads_of
        own.asks_loads_of = asks
        if own.is_dirty or own.expected:
            own.is_dirty = False
            self._wake(key, 0.01)
        if asks:
            self._wake(key, _SOONEST_S if is_new else _LOADS_EACH_S)
        if plan.look_again_at_s is not None:
            self._wake(key, max(plan.look_again_at_s - self._clock.now_s, _SOONEST_S))

    def _fail(self, key: str, own: _Key) -> None:
        """Try again, later and later; whether the call had an effect is not known."""
        own.is_busy = own.is_dirty = False
        own.failures += 1
        delay_s = min(60.0, 0.2 * 2**own.failures)
        own.not_before_s = self._clock.now_s + delay_s
        self._wake(key, delay_s)


class _Key:
    """What a manager knows of one ModelInfer. ``expected``: writes that its caches have yet to show."""

    def __init__(self) -> None:
        self.looks_at_s: float | None = None
        self.is_busy = False
        self.is_dirty = False
        self.failures = 0
        self.not_before_s = 0.0
        self.expected: list[tuple[Resource, int]] = []
        self.asks_loads_of: frozenset[str] = frozenset()
