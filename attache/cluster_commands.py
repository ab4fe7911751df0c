# SPDX-License-Identifier: Apache-2.0
"""Commands of the controller that need to know extproc's plugins, which the controller does not import."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from controller.commands import epp as epp_command
from controller.commands import gateway as gateway_command
from controller.commands import manager as manager_command
from controller.commands import render as render_command

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from extproc.api.picker_config import PickerCheck, PickerFile


class _Checking(Protocol):
    """What a module of such a command offers."""

    def parser(self, prog: str) -> argparse.ArgumentParser:
        """The command's options."""
        ...

    def main(self, words: list[str], prog: str, check_picker: PickerCheck) -> int:
        """Run the command; returns the exit status."""
        ...


class WithPlugins:
    """A program whose check of EndpointPickerConfigs is extproc's own."""

    def __init__(self, program: _Checking) -> None:
        self._program = program

    def parser(self, prog: str) -> argparse.ArgumentParser:
        """The command's options."""
        return self._program.parser(prog)

    def main(self, words: list[str], prog: str) -> int:
        """Run the command; returns the exit status."""
        return self._program.main(words, prog, _check_with_plugins())


def _check_with_plugins() -> PickerCheck:
    """Plugins need numpy, which takes longer to load than most commands: loaded with the first EndpointPickerConfig."""
    found: list[PickerCheck] = []

    def check(file: PickerFile) -> Sequence[str]:
        if not found:
            from extproc.llmd.pickers import InstalledPlugins  # noqa: PLC0415 - see above

            found.append(InstalledPlugins())
        return found[0](file)

    return check


PROGRAMS: Final[Mapping[str, WithPlugins]] = MappingProxyType(
    {
        "epp": WithPlugins(epp_command),
        "gateway": WithPlugins(gateway_command),
        "manager": WithPlugins(manager_command),
        "render": WithPlugins(render_command),
    }
)
