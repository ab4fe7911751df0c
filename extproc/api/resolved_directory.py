# SPDX-License-Identifier: Apache-2.0
"""A configuration directory whose host names are resolved, again and again, in threads."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from extproc.api.host_names import KnownNames, names_in, with_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from extproc.api.directory import ConfigDirectory
    from extproc.api.host_names import Addresses, Patience
    from extproc.api.snapshot import Snapshot

log = logging.getLogger(__name__)

# Between two lookups of a name.
_INTERVAL_S: Final = 2.0
# New names are waited for so long; those that take longer follow when they come.
_FIRST_S: Final = 5.0
_TICK_S: Final = 0.1
# A name server that does not answer holds up one of these.
_THREADS: Final = 8


class ResolvedDirectory:
    """``directory``, read as if it had addresses in place of names. It has changed, too, when a name's addresses have.

    ``lookup``: the addresses of a name; may raise OSError and take long. Threads start with the first name, and look
    names up from then on; reading waits only for names that are new.
    """

    def __init__(
        self,
        directory: ConfigDirectory,
        patience: Patience,
        *,
        clock: Callable[[], float],
        lookup: Callable[[str], Sequence[str]],
    ) -> None:
        self._directory = directory
        self._lookup = lookup
        self._clock = clock
        self._known = KnownNames(patience)
        self._used: Addresses = {}
        self._condition = threading.Condition()
        # by name, when it is to be looked up next; those that are being looked up are not in it
        self._due_at_s: dict[str, float] = {}
        self._wanted: frozenset[str] = frozenset()
        self._pending: set[str] = set()
        self._said: dict[str, str] = {}
        self._threads = 0

    @property
    def path(self) -> Path:
        """That of the directory with the names."""
        return self._directory.path

    def has_changed(self) -> bool:
        """Whether files or addresses have changed since ``read``."""
        return self._directory.has_changed() or (bool(self._wanted) and self._usable() != self._used)

    def read(self) -> Snapshot:
        """The snapshot of what is there now; raises ConfigInvalid. May wait for name servers: not in an event loop."""
        # what cannot be read is not read again because of a name
        self._used = self._usable()
        snapshot = self._directory.read()
        names = names_in(snapshot)
        self._follow(names)
        if not names:
            return snapshot
        self._used = self._usable()
        return with_addresses(snapshot, self._used)

    def _usable(self) -> Addresses:
        with self._condition:
            return self._known.usable(self._clock())

    def _follow(self, names: frozenset[str]) -> None:
        with self._condition:
            new = names - self._wanted
            self._wanted = names
            self._known.forget_all_but(names)
            self._due_at_s = {name: at for name, at in self._due_at_s.items() if name in names}
            self._due_at_s.update(dict.fromkeys(new, self._clock()))
            self._pending = (self._pending & names) | new
            missing = min(_THREADS, len(names)) - self._threads
            self._threads += max(0, missing)
        for _ in range(missing):
            threading.Thread(target=self._look_up_for_ever, name="host names", daemon=True).start()
        with self._condition:
            self._condition.wait_for(lambda: not self._pending, timeout=_FIRST_S)

    def _look_up_for_ever(self) -> None:
        while True:
            name = self._take()
            if name is not None:
                self._look_up(name)
                continue
            with self._condition:
                self._condition.wait(_TICK_S)

    def _take(self) -> str | None:
        now = self._clock()
        with self._condition:
            due = next((name for name, at in self._due_at_s.items() if at <= now), None)
            if due is not None:
                del self._due_at_s[due]
            return due

    def _look_up(self, name: str) -> None:
        try:
            found, problem = self._lookup(name), "it has no address"
        except (OSError, UnicodeError) as error:
            found, problem = (), str(error)
        now = self._clock()
        with self._condition:
            if name in self._wanted:
                self._say(name, found, problem)
                if found:
                    self._known.heard(name, found, now)
                self._due_at_s[name] = now + _INTERVAL_S
            self._pending.discard(name)
            self._condition.notify_all()

    def _say(self, name: str, found: Sequence[str], problem: str) -> None:
        """Once for each change."""
        said = f"is {', '.join(found)}" if found else problem
        if self._said.get(name) == said:
            return
        self._said[name] = said
        if found:
            log.info("the host name %s %s", name, said)
        else:
            kept = ", ".join(self._known.usable(self._clock()).get(name, ())) or "none"
            log.warning("cannot resolve the host name %s: %s; its last addresses stay: %s", name, problem, kept)
