# SPDX-License-Identifier: Apache-2.0
"""A policy of one's own: ``my.py:Mine`` is the class ``Mine`` in the Python file ``my.py``.

Its ``pick(self, view, *, rng)`` gets a View and returns a Pick. Its constructor may take ``tracker`` (InFlightTracker)
and ``calibration`` (EngineCalibration); other parameters need defaults. The name may also be a function, which returns
such an object or a PolicySetup. The file may import what lies beside it.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import xxhash

from bench.lab.policies.trackers import EngineCalibration, InFlightTracker, PolicySetup
from extproc.refusals import NoEndpoint
from extproc.scheduling.picker import Pick, Picker

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from types import TracebackType

    from extproc.scheduling.picker import View

_NAME: Final = re.compile(r"(?P<file>.+\.py)(?::(?P<name>\w*))?")
_SIGNATURE: Final = "def pick(self, view: View, *, rng: random.Random) -> Pick"


class PolicyFailed(Exception):
    """A policy's file that cannot be used, or a pick that failed; the message has the file's own traceback."""


def policy_file(name: str) -> Path | None:
    """The file of a policy that is named ``my.py:Mine``; None for every other policy."""
    found = _NAME.fullmatch(name)
    return None if found is None else Path(found["file"])


def load_policy(name: str) -> Callable[[EngineCalibration], PolicySetup]:
    """The policy that is named ``my.py:Mine``. Making it raises PolicyFailed."""

    def build(calibration: EngineCalibration) -> PolicySetup:
        found = _NAME.fullmatch(name)
        assert found is not None, name
        file = Path(found["file"])
        made = _made(name, file, _target(_loaded(file), file, found["name"] or ""), calibration)
        return PolicySetup(_CheckedPicks(name, file, made), made.observer, made.server)

    return build


def _loaded(file: Path) -> ModuleType:
    try:
        source = file.read_bytes()
    except OSError as error:
        msg = f"{file}: cannot be read: {error.strerror}; give the path of a Python file, as in my.py:Mine"
        raise PolicyFailed(msg) from None
    beside = str(file.resolve().parent)
    sys.path[:] = [beside, *(one for one in sys.path if one != beside)]
    module = ModuleType(f"attache_policy_{xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())}")
    module.__file__ = str(file)
    # dataclasses read their module from sys.modules
    sys.modules[module.__name__] = module
    before = set(sys.modules)
    # Bytecode of a neighbour that was edited within a second would be taken for current. A pick may import one, too, so
    # this process never writes any again.
    sys.dont_write_bytecode = True
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)  # noqa: S102 - it is the user's own program
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told with its traceback
        msg = f"{file}: cannot be loaded:\n{_whole(error, file)}"
        raise PolicyFailed(msg) from None
    finally:
        # another policy's neighbours may have the same names
        for other in set(sys.modules) - before:
            if str(getattr(sys.modules[other], "__file__", None) or "").startswith(beside + "/"):
                del sys.modules[other]
    return module


def _target(module: ModuleType, file: Path, name: str) -> Callable[..., Any]:
    own = [key for key, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
    policies = [key for key in own if hasattr(getattr(module, key), "pick")]
    if not name and len(policies) == 1:
        (name,) = policies
    target: Callable[..., Any] | None = getattr(module, name, None) if name else None
    if not callable(target):
        message = f"has no class or function '{name}'" if name else "does not say which policy it means"
        first = f"{file}:{policies[0]}" if policies else f"{file}:Mine with a class Mine that has {_SIGNATURE}"
        msg = f"{file}: {message}; it has {', '.join(own) or 'none'}; write {first}"
        raise PolicyFailed(msg)
    return target


def _made(name: str, file: Path, target: Callable[..., Any], calibration: EngineCalibration) -> PolicySetup:
    tracker = InFlightTracker()
    given = {"tracker": tracker, "calibration": calibration}
    try:
        wanted = inspect.signature(target).parameters
    except (TypeError, ValueError):
        wanted = inspect.signature(lambda: None).parameters
    missing = [
        one.name
        for one in wanted.values()
        if one.default is one.empty and one.name not in given and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]
    if missing:
        msg = (
            f"{name}: its constructor takes {', '.join(missing)}, which the lab does not have; it may take tracker "
            "(an InFlightTracker), calibration (an EngineCalibration), and what has a default"
        )
        raise PolicyFailed(msg)
    try:
        made = target(**{key: value for key, value in given.items() if key in wanted})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told with its traceback
        msg = f"{name}: cannot be made:\n{_whole(error, file)}"
        raise PolicyFailed(msg) from None
    setup = made if isinstance(made, PolicySetup) else PolicySetup(made, tracker if "tracker" in wanted else None)
    _check_signature(name, setup.picker)
    return setup


def _check_signature(name: str, picker: Picker) -> None:
    pick = getattr(picker, "pick", None)
    if not callable(pick):
        msg = f"{name}: has no method pick; write {_SIGNATURE}"
        raise PolicyFailed(msg)
    try:
        inspect.signature(pick).bind(None, rng=None)
    except TypeError:
        msg = f"{name}: its pick is pick{inspect.signature(pick)}; write {_SIGNATURE}"
        raise PolicyFailed(msg) from None


class _CheckedPicks:
    """A Picker: the user's. Its exceptions and wrong results are reported with their place in the user's file."""

    def __init__(self, name: str, file: Path, setup: PolicySetup) -> None:
        self._name, self._file, self._picker = name, file, setup.picker
        self._tracker = setup.observer if isinstance(setup.observer, InFlightTracker) else None

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Raises PolicyFailed, or NoEndpoint if no endpoint is ready."""
        if self._tracker is not None:
            self._tracker.observe(view)
        candidates = view.candidates()
        try:
            pick: object = self._picker.pick(view, rng=rng)
        except NoEndpoint:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told with its traceback
            msg = f"{self._name}: its pick failed at {view.now_s:.3f} s of the trial:\n{_whole(error, self._file)}"
            raise PolicyFailed(msg) from None
        if not isinstance(pick, Pick):
            msg = f"{self._name}: its pick returned {_short(pick)}; return a Pick, as least_cost makes it"
            raise PolicyFailed(msg)
        if not pick.rows or not all(0 <= row < candidates.size and candidates[row] for row in pick.rows):
            rows = ", ".join(map(str, candidates.nonzero()[0]))
            msg = f"{self._name}: its pick returned the rows {pick.rows}; return one or more of {rows}"
            raise PolicyFailed(msg)
        return pick


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def _whole(error: BaseException, file: Path) -> str:
    """The traceback from the first frame in ``file`` on; all of it if there is none."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != str(file):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()
