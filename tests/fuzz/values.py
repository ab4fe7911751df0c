# SPDX-License-Identifier: Apache-2.0
"""Valid content, broken at random: a value somewhere in plain data, or any bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

_DEEP: Final = 200
_MANY: Final = 3_000


def _nested(levels: int) -> object:
    value: object = 0
    for _ in range(levels):
        value = [value]
    return value


# As JSON can have them, in an API server's objects, too.
JSON_VALUES: Final[tuple[object, ...]] = (
    *(None, True, False, 0, -1, 1, 0.5, -1e308, 1e308, 2**31, 2**32, -(2**63), 2**63 - 1, 2**64 - 1),
    *("", "a", "0", "-1", "1", "NaN", "1e400", "9" * 30, "a" * 70_000, "\0", "\x1b[2J", "\u2028", "\U0001f600", " \n"),
    *("true", "null", "1h", "-5s", "10G", "1.5.5", "127.0.0.1:1", "::1", "[::1]:8000", "2001-99-99T99:99:99Z", "a/b/c"),
    *("../x", "{{", "%s", "(" * 300, "a{99999999999}", "1970-01-01T00:00:00Z", "default/llama"),
    *([], {}, [[]], [None], [{}], {"": ""}, {"a": None}, [0, "a", None, {}], ["a"] * _MANY, _nested(_DEEP)),
    {str(number): number for number in range(_MANY)},
)
# As msgpack can have them.
MSGPACK_VALUES: Final[tuple[object, ...]] = (
    *JSON_VALUES,
    *(float("nan"), float("inf"), float("-inf"), b"", b"\xff\xfe", b"a" * 65, {1: 2}, {b"a": b"b"}),
)


def changed(value: object, rng: random.Random, odd: Callable[[], object], names: Sequence[str] = ()) -> Any:  # noqa: ANN401 - data of any shape
    """``value`` with one change: something is gone, added, or odd. ``odd``: makes what is odd. ``names``: of added
    members.
    """
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        new = dict(value)
        kind = rng.random()
        if kind < 0.1:
            del new[key]
        elif kind < 0.3 and names:
            new[rng.choice(names)] = odd()
        else:
            new[key] = changed(value[key], rng, odd, names)
        return new
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], changed(value[index], rng, odd, names), *value[index + rng.randint(0, 1) :]]
    return odd()


def spoiled(value: object, rng: random.Random, values: Sequence[object], most: int = 3) -> Any:  # noqa: ANN401 - as above
    """``value`` with up to ``most`` changes, at least one."""
    for _ in range(rng.randint(1, most)):
        value = changed(value, rng, lambda: rng.choice(values))
    return value


def broken(content: bytes, rng: random.Random, special: Sequence[bytes], endings: Sequence[bytes] = ()) -> bytes:
    """``content`` cut, repeated, spliced or sprinkled at one place. ``special``: what its readers treat as such.
    ``endings``: of which another end is taken.
    """
    at, end = rng.randint(0, len(content)), rng.randint(0, len(content))
    match rng.randrange(6):
        case 0:
            content = content[:at]
        case 1:
            content = content[:at] + content[at : at + 30] * rng.randint(2, 50) + content[at:]
        case 2:
            content = content[: min(at, end)] + content[max(at, end) :]
        case 3 if endings:
            other = rng.choice(endings)
            content = content[:at] + other[rng.randint(0, len(other)) :]
        case 3:
            content = rng.choice((b"\xef\xbb\xbf", b" " * 5000, b"\0", b"\n")) + content
        case 4:
            content = content[:at] + rng.randbytes(rng.randint(1, 20)) + content[at:]
        case _:
            content = content[:at] + rng.choice(special) + content[at + rng.choice((0, 0, 1, 5)) :]
    return content
