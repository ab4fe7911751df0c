# SPDX-License-Identifier: Apache-2.0
"""``attache render``: print what a cluster's objects, or files of them, compile to."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.api.errors import ConfigInvalid, Mistake
from extproc.cli.system import report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.commands.render_objects import Object, Rendered
    from controller.gateway.compile.secrets import Pointer
    from controller.kube.access import Access
    from controller.kube.client import Client
    from extproc.api.picker_config import PickerCheck

# Rendered by themselves: objects that the manager makes others of, and what it looks at for that.
_OF_MODELS: Final = frozenset({"Model", "ModelTemplate", "ServingRuntime", "ClusterServingRuntime"})
_SUFFIXES: Final = (".yaml", ".yml", ".json")
# An API server that does not answer is not waited for any longer.
_PATIENCE_S: Final = 20.0


def parser(prog: str = "attache render") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Print what objects compile to: the files of the configuration directory, and the statuses that the objects"
            " would get; of a Model, the objects that are made of it and its engines' merged configuration. Nothing is"
            " changed."
        ),
        epilog=(
            "Exit status: 0, 1 if an object is not used as it is written, or 2 for a mistake in the options or in a"
            " file."
        ),
    )
    add = made.add_argument
    add(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a YAML or JSON file of objects, or a directory of such files",
    )
    add(
        "--cluster",
        action="store_true",
        help="the objects of the cluster, by the service account or the kubeconfig; Secrets are not read",
    )
    add(
        "--namespace",
        metavar="NAME",
        help="of objects in files that name none (default: default); with --cluster: of this namespace alone",
    )
    add("--gateway-config", metavar="NAMESPACE/NAME", help="the GatewayConfig to serve; default: one without settings")
    add("--bundle", action="store_true", help="print Envoy's files, too")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the files into DIR/config and DIR/bundle instead of printing them",
    )
    return made


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0, 1 if an object is not used as it is written, 2 for a mistake in the options or in a file."""
    made = parser(prog)
    options = made.parse_args(words)
    if bool(options.paths) == options.cluster:
        made.error("write PATH or --cluster, one of the two")
    if options.gateway_config is not None and options.gateway_config.count("/") != 1:
        made.error("--gateway-config: write NAMESPACE/NAME")
    # decoders of all kinds take a quarter of a second to make: not for --help
    from controller.commands.render_objects import render  # noqa: PLC0415

    models_are_good = True
    try:
        if options.cluster:
            rendered = _of_cluster(options, check_picker)
        else:
            objects = list(_of_files(options))
            others = [one for one in objects if one["kind"] not in _OF_MODELS]
            if len(others) < len(objects):
                models_are_good = _show_models(objects)
                if not others:
                    return 0 if models_are_good else 1
            rendered = render(others, options.gateway_config, check_picker)
        bundle = _bundle(rendered) if options.bundle and not rendered.refused else {}
    except ConfigInvalid as error:
        return report(error)
    except _NoCluster as error:
        print(error, file=sys.stderr)
        return 2
    try:
        _show(rendered, bundle, options.out)
    except OSError as error:
        print(f"cannot write into {options.out}: {error}", file=sys.stderr)
        return 2
    return 0 if rendered.is_good and models_are_good else 1


def _show_models(objects: Sequence[Object]) -> bool:
    """What Models become; whether all of them become something."""
    from controller.commands.render_models import as_text, render_models  # noqa: PLC0415

    found = render_models(objects)
    for one in found:
        print(as_text(one, has_owner=False), end="")
    return not any(one.problem for one in found)


class _NoCluster(Exception):
    """There is no cluster, or it does not answer."""


def _of_files(options: argparse.Namespace) -> Iterator[Object]:
    """Raises ConfigInvalid."""
    from controller.commands.render_objects import objects_in  # noqa: PLC0415

    for path in options.paths:
        files = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigInvalid([Mistake(str(file), 0, "", f"cannot be read: {error}")]) from None
            yield from objects_in(str(file), text, options.namespace or "default")


def _of_cluster(options: argparse.Namespace, check_picker: PickerCheck) -> Rendered:
    """Of what the gateway role would follow; raises _NoCluster."""
    from controller.kube.access import find_access  # noqa: PLC0415
    from controller.kube.errors import AccessInvalid, ClusterError  # noqa: PLC0415

    try:
        return asyncio.run(_rendered(options, find_access(), check_picker))
    except (AccessInvalid, ClusterError) as error:
        raise _NoCluster(str(error)) from None
    except TimeoutError:
        raise _NoCluster(f"the API server does not list our kinds within {_PATIENCE_S:g} s") from None


async def _rendered(options: argparse.Namespace, access: Access, check_picker: PickerCheck) -> Rendered:
    from controller.commands.render_objects import render  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415
    from controller.kube.resources import CONFIG_MAPS, CRDS, SECRETS, split_key  # noqa: PLC0415

    resources = {one.kind: one for one in (CONFIG_MAPS, CRDS, SECRETS)}
    async with connect(access, manager="attache-render") as client:
        objects = await _listed(client, options.namespace)
        asked: set[Pointer] = set()
        while True:
            rendered = render(objects, options.gateway_config, check_picker)
            fresh = set(rendered.missing) - asked
            if not fresh:
                return rendered
            asked |= fresh
            for one in sorted(fresh):
                namespace, name = split_key(one.key)
                found = await client.find(resources[one.kind], name, namespace or None)
                objects += [] if found is None else [found]


async def _listed(client: Client, namespace: str | None) -> list[Object]:
    from controller.gateway.inputs import gateway_informers  # noqa: PLC0415
    from controller.kube.cache import Cache  # noqa: PLC0415

    cache = Cache(client, namespace)
    informers = gateway_informers(cache)
    reading = asyncio.create_task(cache.run())
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await cache.synced()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return [one for _, informer in sorted(informers.items()) for _, one in sorted(informer.objects.items())]


def _bundle(rendered: Rendered) -> Mapping[str, str]:
    """Envoy's files, with API keys as digests; raises ConfigInvalid."""
    from controller.bundle.envoy.bundle import build  # noqa: PLC0415 - Envoy's schema takes half a second to import
    from controller.bundle.secret_files import KeyFiles  # noqa: PLC0415
    from extproc.api.load import load  # noqa: PLC0415

    documents = {name: content for name, content in rendered.files.items() if name.endswith(_SUFFIXES)}
    snapshot, missing = KeyFiles(os.environ).fill_available(load(documents), datetime.now(UTC))
    for mistake in missing:
        print(f"note: not here, so it is as if nobody had it: {mistake}", file=sys.stderr)
    return build(snapshot, "/bundle")


def _show(rendered: Rendered, bundle: Mapping[str, str], out: Path | None) -> None:
    """Raises OSError."""
    from controller.bundle.files import replace_file  # noqa: PLC0415
    from controller.commands.render_objects import as_yaml, status_as_yaml  # noqa: PLC0415
    from controller.gateway.directory import DirectoryWriter  # noqa: PLC0415

    for key in rendered.unused:
        print(f"note: GatewayConfig {key} is not served; name the one to serve with --gateway-config", file=sys.stderr)
    # definitions are looked at for their release alone
    for one in (each for each in rendered.missing if each.kind != "CustomResourceDefinition"):
        print(f"note: {one.kind} {one.key} is not there, and something points to it", file=sys.stderr)
    if rendered.foreign:
        print(f"note: left out, as a gateway does not look at them: {', '.join(rendered.foreign)}", file=sys.stderr)
    if rendered.refused:
        print(f"nothing would be changed: {rendered.refused}", file=sys.stderr)
    if out is None:
        for name, content in rendered.files.items():
            print(as_yaml(name, content), end="")
        for name, text in bundle.items():
            print(as_yaml(f"bundle/{name}", text.encode()), end="")
    else:
        DirectoryWriter(out / "config").write(rendered.files)
        for name, text in bundle.items():
            replace_file(out / "bundle" / name, text.encode(), 0o600)
    for status in rendered.statuses:
        print(status_as_yaml(status), end="")
