# SPDX-License-Identifier: Apache-2.0
"""Every command that the Makefile, README, docs and changelog name, and what shows that it works.

A command has a short form that ``test_commands.py`` runs, or a test elsewhere runs it, or a reason says why none does.
Short forms run in a copy of the sources, so that reports and generated files of a clone stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from tests.named_commands import ROOT
from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from _pytest.mark import ParameterSet

    from bench.stack.orphan_reaper import ProcessGuard


class ShortForm(NamedTuple):
    """``words``: what follows the command. ``says``: patterns of its output. ``writes``: files with something in them.

    ``is_slow``: it takes more than 20 s, or shorter tests run the same code in part. ``limit_s``: ends what hangs.
    """

    command: str
    words: str
    says: tuple[str, ...]
    writes: tuple[str, ...] = ()
    needs_envoy: bool = False
    is_slow: bool = False
    limit_s: float = 120.0


def _report(directory: str, *names: str) -> tuple[str, ...]:
    return tuple(f"bench/out/{directory}/{name}" for name in names)


_MICRO: Final = (r"2 KB, 8 .*no-op", r"answering", r"extproc", r"extproc's threads")
_OVERHEAD: Final = ("bench/out/overhead.json", "bench/out/overhead.md")
SHORT_FORMS: Final = (
    ShortForm("make help", "", (r"^bench +what extproc costs", r"^soak +", r"^clean +")),
    ShortForm(
        "make run",
        "TRACE=small.jsonl 'ARGS=--engines 1 --policies PrefixAware'",
        (r"PrefixAware", r"TTFT mean, ms", r"report: bench/out/run-small/report.md"),
        _report("run-small", "report.md", "results.json", "latency.png"),
        needs_envoy=True,
    ),
    ShortForm("attache bench", "--quick --only '2 KB' --rounds 1", (*_MICRO, "written"), _OVERHEAD, needs_envoy=True),
    # the last line of `make bench`: each benchmark of these once
    ShortForm(
        "python -m pytest",
        "bench/micro/test_core.py bench/micro/test_messages.py bench/micro/test_compile.py "
        "bench/micro/test_allocation.py --benchmark-disable -q -p no:cacheprovider",
        (r"^\d+ passed",),
        is_slow=True,
    ),
    ShortForm(
        "make bench",
        "'ARGS=--quick --only 2KB'",
        (*_MICRO, r"8B, A100, decode of 64", r"deadlines missed", r"test_a_whole_decision", r"^\d+ passed"),
        (*_OVERHEAD, "bench/out/core.json", *_report("fairness", "report.md")),
        needs_envoy=True,
        is_slow=True,
        limit_s=1_800,
    ),
    ShortForm(
        "make soak",
        "'ARGS=--minutes 0.1 --models 4 --hostile none'",
        (r"^ok +end: the soak ran for its time", r"'honest': \{'ok': \d+"),
        _report("soak", "soak.json", "soak.png"),
        needs_envoy=True,
        is_slow=True,
    ),
    ShortForm(
        "make lab",
        "'ARGS=--policies attache,random --rate-factor 0.1'",
        (r"There is no directory of traces", r"^│ attache", r"^│ random", r"written: bench/out/lab/lab.md"),
        _report("lab", "lab.md", "lab.html", "lab.csv", "lab.json"),
        is_slow=True,
    ),
    ShortForm(
        "python -m bench.sizes",
        "--shares 0.01 --modes Close",
        (r"a request, median, ms", r"written to bench/out/sizes"),
        _report("sizes", "sizes.json", "sizes.md", "sizes.png"),
        needs_envoy=True,
        is_slow=True,
    ),
    ShortForm(
        "python -m bench.micro.profile",
        # so that a busy machine leaves enough samples
        "--seconds 5",
        (r"core\.core:Core", r"main"),
        ("bench/out/stacks.txt",),
        needs_envoy=True,
        is_slow=True,
    ),
    ShortForm(
        "python -m tests.fuzz", "bodies --minutes 0.05", (r"an innocent client",), needs_envoy=True, is_slow=True
    ),
    ShortForm("python -m tests.fuzz", "files --minutes 0.05", (r"'failed': 0",), is_slow=True),
)

_HERE: Final = "tests/test_commands.py::"
_STAGED: Final = "tests/tools/test_stages.py::"
_LAB: Final = "tests/bench/lab/test_lab_command.py::"
_TOP: Final = "tests/with_envoy/test_top.py::test_a_killed_engine_is_dead_on_the_screen_until_it_is_back"
_UP: Final = "tests/with_envoy/test_commands.py::test_a_stack_that_is_left_running_serves_until_it_is_interrupted"
_RUN: Final = "tests/with_envoy/test_commands.py::test_a_short_form_works"
# By command: a test that runs it.
TESTED_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "make up": _UP,
        "make up-kube": "tests/with_kube/test_control_plane.py::test_nothing_is_left_of_make_up_kube",
        "make test": _STAGED + "test_every_stage_runs_and_the_tests_that_fail_twice_are_named_at_the_end",
        "make test-all": _STAGED + "test_nothing_runs_twice_if_all_tests_are_asked_for_once",
        "make lab-autoscale": "tests/bench/autoscale/test_report.py::"
        "test_a_quick_run_plays_every_policy_and_writes_the_report",
        "attache reset": "tests/extproc/runtime/test_admin_pages_reset.py::test_the_command_closes_what_it_is_asked_to",
        "attache init": "tests/with_envoy/test_init.py::test_two_directories_are_served_at_once",
        "make generate": _HERE + "test_what_is_generated_is_what_is_committed",
        "make clean": _HERE + "test_nothing_that_make_makes_is_left",
        "attache agent": "tests/controller/agents/runtime/test_agent.py::test_a_pods_life",
        "attache autoscale": "tests/bench/autoscale/test_report.py::"
        "test_a_quick_run_plays_every_policy_and_writes_the_report",
        "attache bundle": "tests/with_envoy/test_acknowledgements.py::"
        "test_without_watch_the_exit_status_says_whether_envoy_took_the_bundle",
        "attache check": "tests/attache/test_commands.py::test_check_prints_a_summary",
        "attache compare": _LAB + "test_two_policies_of_one_replay_are_compared_request_by_request",
        "attache completion": "tests/attache/test_completion.py::test_bash_completes",
        "attache convert": "tests/controller/convert/test_convert.py::test_files_of_users_become_what_is_committed",
        "attache download": "tests/controller/agents/downloader/test_cache_crashes.py::"
        "test_a_download_that_is_killed_half_way_goes_on_where_it_was",
        "attache engine": _UP,
        "attache envoy": "tests/attache/test_envoy.py::test_it_becomes_envoy_with_envoys_own_options",
        "attache epp": "tests/with_kube/test_epp.py::test_it_is_ready_once_there_is_a_pool_and_ends_with_a_signal",
        "attache explain": "tests/attache/test_plugin_page.py::test_the_pages_example_decides",
        "attache explain-scaling": "tests/with_kube/test_scaling_demand.py::test_the_pages_and_the_command_say_why",
        "attache extproc": _UP,
        "attache gateway": "tests/with_kube/test_gateway_process.py::"
        "test_objects_become_a_directory_and_a_signal_ends_it",
        "attache keys": "tests/with_envoy/test_virtual_keys.py::"
        "test_a_stream_of_a_revoked_key_ends_by_itself_and_the_next_request_is_refused",
        "attache lab": _LAB + "test_the_table_of_the_lab_has_a_line_for_each_policy_and_load",
        "attache manager": "tests/with_kube/test_manager_process.py::test_the_leader_is_killed_and_the_other_goes_on",
        "attache render": "tests/controller/commands/test_render.py::"
        "test_files_are_written_that_extproc_and_envoy_can_read",
        "attache replay": _LAB + "test_a_replay_writes_what_is_asked_for_under_the_names_that_are_promised",
        "attache run": _RUN,
        "attache serve": "tests/with_envoy/test_serve.py::test_one_line_tells_that_all_of_it_is_ready",
        "attache slo": "tests/extproc/cli/test_slo.py::test_the_exit_status_says_whether_a_budget_is_used_up",
        "attache top": _TOP,
        "attache translate": "tests/with_envoy/test_translation.py::test_a_client_of_responses_reads_answers_of_both",
        "attache up": _UP,
        "attache usage": "tests/with_envoy/test_serve.py::"
        "test_each_request_has_a_row_whichever_child_is_killed_meanwhile",
        "attache validate": _LAB
        + "test_without_recorded_runs_the_check_of_the_engine_model_says_loudly_what_is_missing",
        "attache workload": _LAB + "test_a_workload_says_how_much_of_it_could_be_cached",
        "python -m attache": _UP,
        "python -m bench.cluster.netns": "tests/bench/cluster/node/test_pod_network.py::"
        "test_a_command_in_the_network_sees_its_range_and_nothing_else",
        "python -m bench.lab.fairness": _RUN,
        "python -m bench.lab.gpu_tiers": "tests/bench/lab/test_gpu_tiers.py::"
        "test_tiers_keep_objectives_at_less_than_the_dear_price",
        "python -m bench.micro": _RUN,
        "python -m extproc": _TOP,
    }
)
# By command: why no test runs it.
NOT_TESTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("make test-unit", "make test-process", "make test-kube-real", "make test-real-time", "make coverage"),
            "runs the tests themselves",
        ),
        "make check": "make test runs it",
        "make soak-short": "is make soak for 15 minutes",
        "make fix": "its programs are those of make check",
        "make test-vllm": "installs 3 GB; make test-all runs it",
        "make test-model-servers": "installs 0.9 GB; make test-all runs it",
        "make sglang-gateway": "installs 150 MB",
        "make docs": "installs a virtual environment of its own",
        "make lock": "needs uv, and asks an index for all packages",
        "make envoy-binary": "fetches what all tests with Envoy need before they begin",
        "make kube-assets": "builds for 10 to 30 minutes; make test-all runs it",
        **dict.fromkeys(
            ("make conformance", "make test-conformance"), "builds for 5 to 10 minutes; make test-all runs some cases"
        ),
        "make image": "needs docker or podman, or is make image-archive",
        "make image-archive": "installs Debian packages for some minutes; make test-image runs it",
        "make test-image": "the same; make test-all runs it",
        "make helm": "builds for some minutes; make test-all runs it where there is Go",
        "make otelcol": "builds for a minute or two; make test-all runs it where there is Go",
        **dict.fromkeys(
            ("python -m bench.cluster.failover", "python -m bench.cluster.manager_cost"),
            "measures a cluster for minutes",
        ),
        "python -m bench.micro.store_outage": "loads three gateways or five for 20 minutes",
        "python -m bench.micro.batching": "loads an engine for two minutes; tests/bench/micro runs its parts",
        "python -m bench.micro.prefill_legs": "measures three gateways for minutes",
        "python -m bench.micro.observability": "measures seven gateways for minutes",
        "python -m bench.micro.response_cache": "loads two gateways for four minutes",
        "python -m bench.micro.translation": "loads a gateway for a minute and a half",
        "python -m bench.micro.pickers": "needs another checkout to compare with",
        "python -m tools.console_pictures": "needs chromium; tests/extproc/console run its parts",
        "python -m tools.dashboard_picture": "needs prometheus and minutes of load",
    }
)


def as_parameter(short: ShortForm) -> ParameterSet:
    """Of a test, which may take a little longer than the command."""
    marks = [pytest.mark.timeout(short.limit_s + 60), *[pytest.mark.slow] * short.is_slow]
    return pytest.param(short, id=f"{short.command} {short.words}".strip(), marks=marks)


def copy_sources(directory: Path) -> None:
    """The clone without what make and programs have written into it."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        is_bench = folder == str(ROOT / "bench")
        return {one for one in names if one.startswith(".") or one == "__pycache__" or (is_bench and one == "out")}

    shutil.copytree(ROOT, directory, ignore=left_out)


def command_line(command: str, words: str = "") -> list[str]:
    """What starts ``command`` with this Python and without making anything first."""
    name, *given = shlex.split(f"{command} {words}")
    if name == "attache":
        return [sys.executable, "-m", "attache", *given]
    if name == "python":
        return [sys.executable, *given]
    # the virtual environment is that of the tests, however old it is
    ready = ["-o", ".venv/ready", f"RUN={sys.executable}", f"PYTHON={sys.executable}"]
    envoy = [f"ENVOY={os.environ['ENVOY']}"] if "ENVOY" in os.environ else []
    return [program("make"), *ready, *envoy, *given]


def environment() -> dict[str, str]:
    """As a user has it: nothing of pytest, of coverage and of a make that runs the tests."""
    of_tests = ("ARGS", "COV", "MAKE", "MFLAGS", "PYTEST")
    return {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}


def run(short: ShortForm, directory: Path, guard: ProcessGuard) -> str:
    """Its output; fails with it unless the exit status is 0."""
    said = directory.parent / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command_line(short.command, short.words),
            cwd=directory,
            env={**environment(), "COLUMNS": "230"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        guard.add(process.pid)
        try:
            status = process.wait(timeout=short.limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.remove(process.pid)
    text = said.read_text()
    assert status == 0, text
    return text


def check(short: ShortForm, directory: Path, guard: ProcessGuard) -> None:
    """Run it in a copy of the sources under ``directory``."""
    clone = directory / "clone"
    copy_sources(clone)
    rows = (f'{{"timestamp": {at}, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}}\n' for at in (0, 200))
    (clone / "small.jsonl").write_text("".join(rows))
    text = run(short, clone, guard)
    assert [one for one in short.says if not re.search(one, text, re.MULTILINE)] == [], text
    assert [one for one in short.writes if not (clone / one).is_file() or not (clone / one).stat().st_size] == []
