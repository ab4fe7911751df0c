# SPDX-License-Identifier: Apache-2.0
"""Requests of V1 (``:predict``) and V2 (``/infer``) as parts of one request, and parts of its answer as answers.

Rows are V1's instances, or the first dimension of V2's tensors. Numbers and texts stay as clients and engines wrote
them: rows are cut out of the JSON and never written anew. A request is joined only if the meaning of every row is
certain. If its shapes and its data disagreed, the rows of others behind it would be taken for its own.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PATH: Final = re.compile(r"/(?:v1/models/[^/?#]+:predict|v2/models/[^/?#]+(?:/versions/[^/?#]+)?/infer)")
_V1_VERSION: Final = re.compile(r"/v1/models/[^/?#]+/versions/[^/?#]+:predict")
_MEMBERS: Final = msgspec.json.Decoder(dict[str, Raw])
_TENSORS: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_SHAPE: Final = msgspec.json.Decoder(list[int])
_ITEMS: Final = msgspec.json.Decoder(list[Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_LIST: Final = msgspec.json.Decoder(list[Any])
_ID: Final = "id"
# Of deeper nesting msgspec raises it.
_NO_JSON: Final = (ValueError, RecursionError)
# Beyond, numpy makes other types of integers, and so of those that are joined with them.
_INTEGERS: Final = range(-(2**63), 2**63)


_Attributes = tuple[tuple[str, bytes], ...]


class TensorSignature(msgspec.Struct, frozen=True):
    """``attributes``: its other members as JSON, by name. ``trailing``: the shape without its first dimension.
    ``is_nested``: the data are lists by shape, rather than one list.
    """

    attributes: _Attributes
    trailing: tuple[int, ...]
    is_nested: bool


class BatchSignature(msgspec.Struct, frozen=True):
    """What requests that are joined have in common. ``members``: of the body. ``instance``: V1's, and ``inputs``:
    V2's.
    """

    path: str
    members: _Attributes
    instance: Hashable = None
    inputs: tuple[TensorSignature, ...] = ()


class BatchableRequest(msgspec.Struct, frozen=True):
    """A request that may be joined with others that have an equal ``form``.

    ``rows``: how many it has. ``pieces``: of V1 the instances, of V2 the data of each input, as JSON without the
    brackets around it. ``id``: of V2, as JSON; None without one.
    """

    form: BatchSignature
    rows: int
    pieces: tuple[bytes, ...]
    id: bytes | None = None


class ResponseUnsplittable(Exception):
    """The answer cannot be shared out; the message has why."""


class _Uncertain(Exception):
    """What follows from a request is not certain enough to join it with others."""


def is_joinable_path(path: str) -> bool:
    """Whether requests to ``path`` may be joined at all."""
    return bool(_PATH.fullmatch(path) or _V1_VERSION.fullmatch(path))


def parse_batch_part(path: str, body: bytes) -> BatchableRequest | None:
    """None: the request is not joined with others. ``path``: one of ``is_joinable_path``."""
    try:
        members = _MEMBERS.decode(body)
        return _v1_part(path, members) if path.startswith("/v1/") else _v2_part(path, members)
    except (*_NO_JSON, _Uncertain):
        return None


def merge_requests(parts: Sequence[BatchableRequest]) -> bytes:
    """The body of one request for all of ``parts``, whose forms are equal."""
    form = parts[0].form
    lists = [Raw(b"[" + b",".join(pieces) + b"]") for pieces in zip(*(one.pieces for one in parts), strict=True)]
    if not form.inputs:
        return msgspec.json.encode({**_members(form.members), "instances": lists[0]})
    rows = sum(one.rows for one in parts)
    inputs = [
        {**_members(one.attributes), "shape": [rows, *one.trailing], "data": data}
        for one, data in zip(form.inputs, lists, strict=True)
    ]
    return msgspec.json.encode({**_members(form.members), "inputs": inputs})


def split_response(answer: bytes, parts: Sequence[BatchableRequest]) -> list[bytes]:
    """The bodies of the answers to ``parts``, in their order. Raises Unsplittable."""
    bounds = list(pairwise(accumulate((one.rows for one in parts), initial=0)))
    try:
        members = _MEMBERS.decode(answer)
        if parts[0].form.inputs:
            return _split_v2(members, [one.id for one in parts], bounds)
        return _split_v1(members, bounds)
    except _NO_JSON as error:
        raise ResponseUnsplittable(f"it is not the JSON of an answer: {error}") from None


def _v1_part(path: str, members: dict[str, Raw]) -> BatchableRequest:
    text = bytes(members.pop("instances", Raw(b"[]")))
    instances = _LIST.decode(text)
    if not instances:
        raise _Uncertain
    kind = _kind(instances[0])
    for one in instances[1:]:
        found = _merged(kind, _kind(one))
        if found is None:
            raise _Uncertain
        kind = found
    return BatchableRequest(BatchSignature(path, _attributes(members), kind), len(instances), (_inner(text),))


def _v2_part(path: str, members: dict[str, Raw]) -> BatchableRequest:
    own_id = members.pop(_ID, None)
    if own_id is not None:
        _TEXT.decode(own_id)
    tensors = _TENSORS.decode(members.pop("inputs", Raw(b"[]")))
    if not tensors:
        raise _Uncertain
    rows, inputs, pieces = set[int](), list[TensorSignature](), list[bytes]()
    for tensor in tensors:
        shape = _SHAPE.decode(tensor.pop("shape", Raw(b"[]")))
        text = bytes(tensor.pop("data", Raw(b"[]")))
        if not shape or min(shape) < 1:
            raise _Uncertain
        is_nested = _is_nested(_LIST.decode(text), shape)
        rows.add(shape[0])
        inputs.append(TensorSignature(_attributes(tensor), tuple(shape[1:]), is_nested))
        pieces.append(_inner(text))
    if len(rows) != 1:
        raise _Uncertain
    form = BatchSignature(path, _attributes(members), inputs=tuple(inputs))
    return BatchableRequest(form, rows.pop(), tuple(pieces), None if own_id is None else bytes(own_id))


def _attributes(members: Mapping[str, Raw]) -> _Attributes:
    return tuple(sorted((name, bytes(value)) for name, value in members.items()))


def _members(attributes: _Attributes) -> dict[str, object]:
    return {name: Raw(value) for name, value in attributes}


def _inner(text: bytes) -> bytes:
    """A list's items, as they are written."""
    return text.strip()[1:-1]


def _is_nested(data: list[Any], shape: Sequence[int]) -> bool:
    """Whether the data of a tensor has its shape, rather than all its numbers in a row. Raises _Uncertain if it has
    more or fewer than that.
    """
    if len(data) == prod(shape) and not any(isinstance(one, list | dict) for one in data):
        return False
    _check_shape(data, shape)
    return True


def _check_shape(data: object, shape: Sequence[int]) -> None:
    if not shape:
        if isinstance(data, list | dict):
            raise _Uncertain
    elif not isinstance(data, list) or len(data) != shape[0]:
        raise _Uncertain
    else:
        for one in data:
            _check_shape(one, shape[1:])


def _kind(value: object) -> Hashable:
    """The shape and the types of an instance, because engines make one array of all: an integer would become a float
    beside a float. Raises _Uncertain.
    """
    if isinstance(value, list):
        kinds = [_kind(one) for one in value]
        common: Hashable | None = kinds[0] if kinds else "nothing"
        for one in kinds[1:]:
            common = None if common is None else _merged(common, one)
        return (len(kinds), common) if common is not None else ("mixed", *kinds)
    if isinstance(value, dict):
        return ("object", *((name, _kind(one)) for name, one in sorted(value.items())))
    if type(value) is int and value not in _INTEGERS:
        raise _Uncertain
    return type(value).__name__


def _merged(one: Hashable, other: Hashable) -> Hashable | None:
    """The kind of both together; None if they differ in more than integers and floats."""
    if one == other:
        return one
    if {one, other} == {"int", "float"}:
        return "float"
    if not (isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)):
        return None
    found = [_merged(*pair) for pair in zip(one, other, strict=True)]
    return None if None in found else tuple(found)


def _split_v1(members: dict[str, Raw], bounds: Sequence[tuple[int, int]]) -> list[bytes]:
    predictions = _ITEMS.decode(members.get("predictions", Raw(b"null")))
    if len(predictions) != bounds[-1][1]:
        raise ResponseUnsplittable(f"it has {len(predictions)} predictions for {bounds[-1][1]} instances")
    _check_common(members, "predictions")
    return [msgspec.json.encode({**members, "predictions": predictions[begin:end]}) for begin, end in bounds]


def _split_v2(members: dict[str, Raw], ids: Sequence[bytes | None], bounds: Sequence[tuple[int, int]]) -> list[bytes]:
    _check_common(members, "outputs")
    total = bounds[-1][1]
    outputs = _TENSORS.decode(members.get("outputs", Raw(b"null")))
    cut = [_cut(output, total, bounds) for output in outputs]
    given = members.get(_ID)
    found = []
    for number, own in enumerate(ids):
        whole: dict[str, object] = dict(members)
        if own is not None:
            whole[_ID] = Raw(own)
        elif given is not None:
            # the engine makes one for each request that has none
            whole[_ID] = f"{_TEXT.decode(given)}-{number}"
        whole["outputs"] = [tensors[number] for tensors in cut]
        found.append(msgspec.json.encode(whole))
    return found


def _cut(output: dict[str, Raw], total: int, bounds: Iterable[tuple[int, int]]) -> list[dict[str, object]]:
    """An output, for each of the requests."""
    name = bytes(output.get("name", Raw(b""))).decode()
    shape = _SHAPE.decode(output.get("shape", Raw(b"null")))
    items = _ITEMS.decode(output.get("data", Raw(b"null")))
    _check_common(output, "shape", "data")
    if not shape or shape[0] != total:
        raise ResponseUnsplittable(f"output {name} has the shape {shape} for {total} rows")
    each = prod(shape[1:])
    if len(items) == total and all(bytes(one).startswith(b"[") for one in items):
        each = 1
    elif len(items) != total * each:
        raise ResponseUnsplittable(f"output {name} has {len(items)} values for the shape {shape}")
    return [
        {**output, "shape": [end - begin, *shape[1:]], "data": items[begin * each : end * each]}
        for begin, end in bounds
    ]


def _check_common(members: Mapping[str, Raw], *by_row: str) -> None:
    """What is not shared out goes to every client, so it must not hold rows."""
    for name, value in members.items():
        if name not in by_row and b"[" in bytes(value):
            raise ResponseUnsplittable(f"it has lists in '{name}', and whose they are is not known")
