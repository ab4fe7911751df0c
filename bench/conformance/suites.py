# SPDX-License-Identifier: Apache-2.0
"""The suites that are run, where they are built, and the words they are started with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.cluster.assets import ROOT, Versions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GATEWAY_API: Final = "gateway-api"
INFERENCE: Final = "inference-extension"
ECHO: Final = "echo-basic"
GATEWAY_CLASS: Final = "attache"
_IMPLEMENTATION: Final = {
    "organization": "attache",
    "project": "attache",
    "url": "https://attache.dev",
    "contact": "https://attache.dev",
    "version": "main",
}


class Suite(msgspec.Struct, frozen=True):
    """One suite in one version, without a leading ``v``."""

    kind: str
    version: str

    @property
    def name(self) -> str:
        """As reports and pages have it."""
        return f"{self.kind}-{self.version}"

    @property
    def program(self) -> str:
        """The file that runs it."""
        return f"{self.name}.test"


def suites(wanted: Versions) -> list[Suite]:
    """All that are run, in their order."""
    inference = [Suite(INFERENCE, version) for version in wanted.inference_conformance]
    return [Suite(GATEWAY_API, wanted.gateway_api), *inference]


def chosen(names: Sequence[str], among: Sequence[Suite]) -> list[Suite]:
    """The suites of these names or kinds, all without any; raises KeyError for a name of none."""
    for name in names:
        if not any(name in (one.name, one.kind) for one in among):
            raise KeyError(name)
    return [one for one in among if not names or one.name in names or one.kind in names]


def built_in(wanted: Versions, root: Path = ROOT) -> Path:
    """Where the suites are built; it has all of them in it, each under a name with its version."""
    return root / ".tools" / f"conformance-{wanted.gateway_api}"


class Wishes(msgspec.Struct, frozen=True):
    """What somebody who works on the gateway may want; a report for the page is made without any of it.

    ``run``: the names of the cases to run. ``features``: those to test, separated by commas; else the suite of the
    Gateway API asks the GatewayClass, whose status lists them. ``quick``: shorter waits than the suite's own.
    """

    run: tuple[str, ...] = ()
    features: str = ""
    quick: bool = False


def arguments(suite: Suite, report: Path, usable_address: str, wishes: Wishes) -> list[str]:
    """The words after the program's name."""
    words = [
        "-test.v",
        # beside the suite the module has tests of its own parts
        f"-test.run=^TestConformance${_only(wishes.run)}",
        "-test.count=1",
        f"-gateway-class={GATEWAY_CLASS}",
        f"-report-output={report}",
        "-cleanup-base-resources=false",
        *(f"-{name}={value}" for name, value in _IMPLEMENTATION.items()),
    ]
    if suite.kind == INFERENCE:
        # its own Gateway API is older than ours
        return [*words, "-allow-crds-mismatch=true"]
    words += [
        "-conformance-profiles=GATEWAY-HTTP",
        f"-usable-address={usable_address}",
        # of a network for documentation, which no machine has
        "-unusable-address=192.0.2.1",
    ]
    if wishes.features:
        words.append(f"-supported-features={wishes.features}")
    return [*words, f"-timeout-config-overrides={_QUICK}"] if wishes.quick else words


def _only(names: Sequence[str]) -> str:
    return f"/^({'|'.join(names)})$" if names else ""


_QUICK: Final = ";".join(
    f"{name}:15"
    for name in (
        "GatewayMustHaveAddress",
        "GatewayMustHaveCondition",
        "GatewayStatusMustHaveListeners",
        "GatewayListenersMustHaveConditions",
        "HTTPRouteMustNotHaveParents",
        "HTTPRouteMustHaveCondition",
        "RouteMustHaveParents",
        "MaxTimeToConsistency",
        "LatestObservedGenerationSet",
        "DefaultTestTimeout",
    )
)
