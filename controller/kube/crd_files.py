# SPDX-License-Identifier: Apache-2.0
"""The files of ``manifests/crds``, from the structs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from controller.kube.custom_resources import KINDS, crd_object

if TYPE_CHECKING:
    from collections.abc import Mapping


def crd_yaml_files() -> Mapping[str, str]:
    """Every definition as YAML, by the name of its file, and the list of them for kustomize."""
    found = {f"{kind.resource.group}_{kind.resource.plural}.yaml": _to_yaml(crd_object(kind)) for kind in KINDS}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(found),
    }
    return {**found, "kustomization.yaml": _to_yaml(kustomization)}


class _Dumper(yaml.SafeDumper):
    """Without anchors, which other parsers of manifests may not support."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as the base class has it
        return True


def _to_yaml(definition: Mapping[str, Any]) -> str:
    text: str = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
    return f"# written by make generate\n{text}"
