# SPDX-License-Identifier: Apache-2.0
"""One layer over another: plain merge of typed fields, strategic merge of PodSpecs.

Plain: maps are merged, everything else is replaced; lists of named items (``keyed``) are merged by name. Strategic: as
the API server's strategic merge patch does it for a PodSpec. Its lists are merged by the keys of Kubernetes' API
(https://kubernetes.io/docs/reference/generated/kubernetes-api/ has them as "patch merge key"), or replaced where
Kubernetes has none, such as ``tolerations``. ``$patch: delete`` removes an item or a map's contents, ``$patch: replace``
drops what the lower layer has, and null removes a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

_DIRECTIVE: Final = "$patch"
# By the field's name; in a PodSpec a name has one meaning, except for those in _NOT_HERE.
_POD_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "containers": "name",
        "initContainers": "name",
        "ephemeralContainers": "name",
        "env": "name",
        "ports": "containerPort",
        "volumeMounts": "mountPath",
        "volumeDevices": "devicePath",
        "volumes": "name",
        "imagePullSecrets": "name",
        "hostAliases": "ip",
        "topologySpreadConstraints": "topologyKey",
        "schedulingGates": "name",
        "resourceClaims": "name",
    }
)
# A volume has one source: another kind of source replaces it.
_ONE_SOURCE: Final = frozenset({"volumes"})


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any], keyed: Mapping[str, str]) -> dict[str, Any]:
    """``upper`` over ``lower``. ``keyed``: the key of lists of items, by the list's field."""
    return _merged(lower, upper, keyed, frozenset())


def strategic(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """A partial PodSpec over another."""
    return _merged(lower, upper, _POD_KEYS, _ONE_SOURCE)


def _merged(
    lower: Mapping[str, Any], upper: Mapping[str, Any], keyed: Mapping[str, str], one_source: frozenset[str]
) -> dict[str, Any]:
    directive = upper.get(_DIRECTIVE)
    if directive == "delete":
        return {}
    found = {} if directive == "replace" else dict(lower)
    for name, value in upper.items():
        if name == _DIRECTIVE:
            continue
        if value is None:
            found.pop(name, None)
            continue
        found[name] = _value(name, found.get(name), value, keyed, one_source)
    return found


def _value(name: str, lower: object, upper: object, keyed: Mapping[str, str], one_source: frozenset[str]) -> object:
    if isinstance(upper, Mapping):
        return _merged(lower if isinstance(lower, Mapping) else {}, upper, keyed, one_source)
    if isinstance(upper, (list, tuple)):
        if name not in keyed or not _are_items([*upper, *_listed(lower)]):
            return list(upper)
        return _items(_listed(lower), upper, name, keyed, one_source)
    return upper


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _are_items(values: Sequence[object]) -> bool:
    return all(isinstance(one, Mapping) for one in values)


def _items(
    lower: Sequence[Mapping[str, Any]],
    upper: Sequence[Mapping[str, Any]],
    name: str,
    keyed: Mapping[str, str],
    one_source: frozenset[str],
) -> list[Mapping[str, Any]]:
    """In the lower layer's order, and then what is new."""
    if any(one == {_DIRECTIVE: "replace"} for one in upper):
        lower, upper = (), [one for one in upper if one != {_DIRECTIVE: "replace"}]
    key = keyed[name]
    found: dict[object, Mapping[str, Any]] = {one.get(key): one for one in lower}
    for item in upper:
        identity = item.get(key)
        if item.get(_DIRECTIVE) == "delete":
            found.pop(identity, None)
            continue
        before = found.get(identity, {})
        if name in one_source and set(item) - {key} and set(before) - {key} != set(item) - {key}:
            before = {}
        found[identity] = _merged(before, item, keyed, one_source)
    return list(found.values())
