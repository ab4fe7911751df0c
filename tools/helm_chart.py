# SPDX-License-Identifier: Apache-2.0
"""The Helm chart in ``deploy/charts/attache``, made from the same files as the Kustomize bases (``make generate``).

A base becomes one template. Components add to it what a value turns on: their objects, and their patches as conditions
within the base's objects. In an object under construction ``'@EXPRESSION@'`` stands for a value, and ``'@@ACTION@@'``
for a line of its own. ``crds/`` leads to the definitions; ``.helmignore`` and ``NOTES.txt`` are written by hand.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from attache import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "deploy" / "charts" / "attache"
_MANIFESTS: Final = ROOT / "manifests"
_HEAD: Final = "# written by make generate\n"
_NAMESPACE: Final = "attache-system"
# Helm makes the namespace of a release, and refuses one that a chart holds, too.
_LEFT_OUT: Final = "Namespace"
_CLUSTER_SCOPED: Final = frozenset(
    {"APIService", "ClusterRole", "ClusterRoleBinding", "GatewayClass", "ValidatingWebhookConfiguration"}
)
# By base: its components, each with the value that turns it on.
COMPONENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "manager": {
        "externalMetrics": "manager-components/external-metrics",
        "keda": "manager-components/keda",
        "metricsAuth": "manager-components/metrics-auth",
    },
    # usage is the last: it inserts a container, and its patches alone count it
    "gateway": {
        "gatewayAPI": "gateway-api",
        "highAvailability": "gateway-ha",
        "translation": "gateway-components/translation",
        "console": "gateway-components/console",
        "usage": "gateway-components/usage",
    },
}
# A Redis of the user's own takes the place of the component's.
_REDIS: Final = "--redis=redis://attache-redis:6379"
_OWN_REDIS: Final = '@printf "--redis=%s" (.Values.gateway.redisURL | default "redis://attache-redis:6379") | quote@'
_CONDITIONS: Final = {
    _REDIS: "or .Values.gateway.highAvailability .Values.gateway.redisURL",
    "redis.yaml": "and .Values.gateway.highAvailability (not .Values.gateway.redisURL)",
}


class Value(NamedTuple):
    """A value that users may set. ``schema``: of JSON; by default that of the default's type."""

    default: Any
    meaning: str
    schema: Mapping[str, Any] | None = None


class _Dumper(yaml.SafeDumper):
    """Writes what several objects share in each of them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as in the base class
        return True


def files() -> dict[Path, str]:
    """Every file that is made."""
    chart = {
        "apiVersion": "v2",
        "name": "attache",
        "description": "Attaché: Envoy with a picker of inference engines, and the manager that runs the engines",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.29.0-0",  # sidecar containers
    }
    schema = _schema(values())
    # Helm adds it to the values of a chart within a chart
    schema["properties"]["global"] = {"type": "object"}
    made = {
        "Chart.yaml": _HEAD + _yaml(chart),
        "values.yaml": _HEAD + "".join(_commented(values())),
        "values.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        **{f"templates/{base}.yaml": _template(base) for base in COMPONENTS},
    }
    return {CHART / name: text for name, text in made.items()}


# Values


def values() -> dict[str, Any]:
    """Groups and Values by name, with the defaults of the manifests."""
    found: dict[str, Any] = {}
    images = {}
    for base in COMPONENTS:
        deployment = next(one for one in _patched(base) if one["kind"] == "Deployment")
        containers = {one["name"]: one for one in _containers(deployment)}
        pod = deployment["spec"]["template"]["spec"]
        images.update({name: one["image"] for name, one in containers.items()})
        found[base] = {
            "replicas": Value(deployment["spec"]["replicas"], "Pods."),
            "args": Value(
                {name: [] for name in containers},
                "More arguments of each container, such as [--workers=2].",
                _closed({name: {"type": "array", "items": {"type": "string"}} for name in containers}),
            ),
            "resources": Value(
                {name: one["resources"] for name, one in containers.items()},
                "Requests and limits of each container.",
                _closed({name: {"type": "object"} for name in containers}),
            ),
            "pod": Value(
                {},
                "More fields of the pods' spec, such as imagePullSecrets, nodeSelector and tolerations.",
                {"type": "object", "propertyNames": {"not": {"enum": sorted(pod)}}},
            ),
        }
    manager, gateway = found["manager"], found["gateway"]
    config = next(one for one in _objects("gateway") if one["kind"] == "GatewayConfig")
    return {
        "image": Value("attache", "The image of Attaché with its tag. None is published yet: `make image` builds it."),
        "envoyImage": Value(images["envoy"], "Envoy's image with its tag."),
        "manager": {
            "enabled": Value(True, "The manager runs Models and ModelInfers, scales, and checks objects."),
            **manager,
            "externalMetrics": Value(False, "Serve its decisions to HorizontalPodAutoscalers."),
            "keda": Value(False, "Serve its decisions to KEDA."),
            "metricsAuth": Value(False, "Serve its metrics with HTTPS, to accounts that may read them."),
        },
        "gateway": {
            "enabled": Value(True, "The gateway is Envoy with extproc and the gateway role."),
            **gateway,
            "highAvailability": Value(
                False, "2 to 10 pods by load in place of `replicas`, and a Redis through which they share state."
            ),
            "redisURL": Value("", "A Redis of your own, redis://HOST:PORT; the chart makes none then."),
            "gatewayAPI": Value(False, "Serve Gateways of the Gateway API, whose definitions must be there."),
            "translation": Value(False, "Translate between APIs, for ModelServers with `translation`."),
            "console": Value(
                False,
                "Ask those who open the console for `token` of the Secret attache-console, and show them what the"
                " manager decides.",
            ),
            "usage": Value(
                False,
                "Keep a row for each request in a database, whose URL is `store` of the Secret attache-usage, and serve"
                " reports.",
            ),
            "config": Value(
                config["spec"],
                "The spec of the GatewayConfig. Without `authentication` everybody who reaches the Service may use"
                " every model.",
                {"type": "object"},
            ),
            "service": Value(
                {},
                "More fields of the Service's spec, such as {type: LoadBalancer}.",
                {"type": "object", "propertyNames": {"not": {"enum": ["ports", "selector"]}}},
            ),
            "serviceAnnotations": Value({}, "Annotations of the Service, of which clouds take settings."),
        },
    }


def _commented(group: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of values.yaml, each value below its meaning."""
    for name, one in group.items():
        if isinstance(one, Value):
            yield textwrap.fill(one.meaning, 116, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ") + "\n"
            yield textwrap.indent(_yaml({name: one.default}), indent)
        else:
            yield f"\n{indent}{name}:\n"
            yield from _commented(one, f"{indent}  ")


def _schema(one: Any) -> dict[str, Any]:  # noqa: ANN401 - a group or a Value
    """The types of the values, by which Helm refuses a mistyped name."""
    if not isinstance(one, Value):
        return _closed({name: _schema(each) for name, each in one.items()})
    types = {bool: "boolean", int: "integer", str: "string", dict: "object"}
    return {"description": one.meaning, **(one.schema or {"type": types[type(one.default)]})}


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


# Templates


def _template(base: str) -> str:
    objects = _patched(base)
    parts = []
    for value, folder in COMPONENTS[base].items():
        condition = f".Values.{base}.{value}"
        for file in _resources(folder):
            text = "".join(map(_text, _read(folder, file)))
            parts.append(f"{{{{- if {_CONDITIONS.get(file, condition)} }}}}\n{text}{{{{- end }}}}\n")
    for one in objects:
        _MARKS.get(one["kind"], _nothing)(one, base)
    whole = "".join([*map(_text, objects), *parts])
    return f"{_HEAD}{{{{- if .Values.{base}.enabled }}}}\n{whole}{{{{- end }}}}\n"


def _patched(base: str) -> list[dict[str, Any]]:
    """The objects of a base, with what its components change in them as conditions."""
    objects = _objects(base)
    for value, folder in COMPONENTS[base].items():
        for patch in _kustomization(folder).get("patches", ()):
            (patched,) = (one for one in objects if _matches(one, patch["target"]))
            for operation in yaml.safe_load(patch["patch"]):
                _patch(patched, operation, f".Values.{base}.{value}")
    return objects


def _patch(patched: dict[str, Any], operation: Mapping[str, Any], condition: str) -> None:
    """An operation of JSON patch as a condition. Raises ValueError for one that no component has."""
    *path, name = operation["path"].split("/")[1:]
    parent: Any = patched
    for step in path:
        parent = parent[_place(parent, step) if isinstance(parent, list) else step]
    match operation["op"], parent:
        case "test", dict() if parent[name] == operation["value"]:
            pass
        case "add", list() if (place := _place(parent, name)) is not None:
            value = operation["value"]
            begin = f"@@if {_CONDITIONS.get(value, condition) if isinstance(value, str) else condition}@@"
            parent[place:place] = [begin, _OWN_REDIS if value == _REDIS else value, "@@end@@"]
        case "add", dict() if name not in parent:
            parent.update({f"@@if {condition}@@": None, name: operation["value"], "@@end@@": None})
        case "remove", dict():
            items = [*parent.items()]
            parent.clear()
            for key, value in items:
                whole = {f"@@if not {condition}@@": None, key: value, "@@end@@": None}
                parent.update(whole if key == name else {key: value})
        case _:
            raise ValueError(f"tools/helm_chart.py cannot make a condition of {operation}")


def _place(items: Sequence[Any], index: str) -> int | None:
    """Where in a list the item is that has this index without the marks; ``-`` and one more than the last: its end."""
    places = [*(place for place, one in enumerate(items) if not _is_mark(one)), len(items)]
    return len(items) if index == "-" else dict(enumerate(places)).get(int(index))


def _is_mark(one: object) -> bool:
    return isinstance(one, str) and one.startswith("@@")


def _mark_deployment(deployment: dict[str, Any], base: str) -> None:
    deployment["spec"]["replicas"] = f"@.Values.{base}.replicas@"
    for container in _containers(deployment):
        name = container["name"]
        container["image"] = (
            "@.Values.image | quote@" if container["image"] == "attache" else "@.Values.envoyImage | quote@"
        )
        container["resources"] = f"@toJson .Values.{base}.resources.{name}@"
        container["args"] += [f"@@range .Values.{base}.args.{name}@@", "@quote .@", "@@end@@"]
    deployment["spec"]["template"]["spec"].update(_each(f".Values.{base}.pod"))


def _mark_service(service: dict[str, Any], base: str) -> None:
    # that of steps is for the cluster alone, wherever clients come from
    if base == "gateway" and service["metadata"]["name"] == "attache-gateway":
        begin = "@@with .Values.gateway.serviceAnnotations@@"
        service["metadata"].update({begin: None, "annotations": "@toJson .@", "@@end@@": None})
        service["spec"].update(_each(".Values.gateway.service"))


def _mark_config(config: dict[str, Any], base: str) -> None:
    """The spec is the user's; fields within what a component adds to it take the place of the user's."""
    whole, condition = f".Values.{base}.config", ""
    for name, value in config["spec"].items():
        if _is_mark(name):
            condition = name.strip("@").removeprefix("if ")
        elif condition not in {"", "end"}:
            added = f"ternary (fromJson `{json.dumps({name: value})}`) dict ({condition})"
            whole = f"(mergeOverwrite (deepCopy {whole}) ({added}))"
    config["spec"] = f"@toJson {whole}@"


def _nothing(one: dict[str, Any], base: str) -> None:
    pass


_MARKS: Final = {"Deployment": _mark_deployment, "Service": _mark_service, "GatewayConfig": _mark_config}


def _each(value: str) -> dict[str, str | None]:
    """The fields of a value, as fields of what it is added to."""
    return {f"@@range $name, $field := {value}@@": None, "@$name@": "@toJson $field@", "@@end@@": None}


def _text(one: dict[str, Any]) -> str:
    """An object with the namespace that Kustomize gives it, and its marks as actions of a template."""
    if one["kind"] not in _CLUSTER_SCOPED:
        one["metadata"] = {"name": one["metadata"]["name"], "namespace": _NAMESPACE, **one["metadata"]}
    text = re.sub(r"^( *)(?:- )?'@@(.+)@@'(?:: null)?$", r"\1{{- \2 }}", _yaml(one), flags=re.MULTILINE)
    text = re.sub(r"'@(.+?)@'", r"{{ \1 }}", text)
    text = re.sub(rf"(?<=: ){_NAMESPACE}$", "{{ .Release.Namespace | quote }}", text, flags=re.MULTILINE)
    return "---\n" + text.replace(_NAMESPACE, "{{ .Release.Namespace }}")


# Manifests


def _kustomization(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((_MANIFESTS / folder / "kustomization.yaml").read_text())
    return found


def _resources(folder: str) -> list[str]:
    """Its own files, in the order that it has."""
    return [one for one in _kustomization(folder).get("resources", ()) if one.endswith(".yaml")]


def _read(folder: str, file: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((_MANIFESTS / folder / file).read_text())]


def _objects(folder: str) -> list[dict[str, Any]]:
    return [one for file in _resources(folder) for one in _read(folder, file) if one["kind"] != _LEFT_OUT]


def _matches(one: Mapping[str, Any], target: Mapping[str, str]) -> bool:
    return (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])


def _containers(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    spec = deployment["spec"]["template"]["spec"]
    return [one for one in (*spec.get("initContainers", ()), *spec["containers"]) if not _is_mark(one)]


def _yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
