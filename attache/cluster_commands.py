# SPDX-License-Identifier: Apache-2.0
"""Commands of the controller that need to know extproc's plugins, which the controller does not import."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from extproc.api.picker_config import reject_file_references

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from extproc.api.picker_config import PickerConfigChecker, PickerFile


class CommandWithPlugins:
    """A program whose check of EndpointPickerConfigs is extproc's own.

    ``module``: has ``parser(prog)`` and ``main(words, prog, check_picker)``; it is imported when one of them is called.
    """

    def __init__(self, module: str, *, of_objects: bool = True) -> None:
        """``of_objects``: the files are a cluster's objects, and not the operator's own."""
        self._module = module
        self._of_objects = of_objects

    def parser(self, prog: str) -> argparse.ArgumentParser:
        """The command's options."""
        return self._program().parser(prog)  # type: ignore[no-any-return] # of a module that is found by name

    def main(self, words: list[str], prog: str) -> int:
        """Run the command; returns the exit status."""
        return self._program().main(words, prog, _check_with_plugins(of_objects=self._of_objects))  # type: ignore[no-any-return] # likewise

    def _program(self) -> Any:  # noqa: ANN401 - a module
        return import_module(self._module)


def _check_with_plugins(*, of_objects: bool) -> PickerConfigChecker:
    """Plugins need numpy, which takes longer to load than most commands: loaded with the first EndpointPickerConfig."""
    found: list[PickerConfigChecker] = []

    def check(file: PickerFile) -> Sequence[str]:
        if of_objects:
            reject_file_references(file)
        if not found:
            from extproc.llmd.picker_builder import InstalledPluginChecker  # noqa: PLC0415 - see above

            found.append(InstalledPluginChecker())
        return found[0](file)

    return check


PROGRAMS: Final[Mapping[str, CommandWithPlugins]] = MappingProxyType(
    {
        "epp": CommandWithPlugins("controller.commands.epp", of_objects=False),
        **{name: CommandWithPlugins(f"controller.commands.{name}") for name in ("gateway", "manager", "render")},
    }
)
