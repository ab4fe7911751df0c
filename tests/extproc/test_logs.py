# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: one a call, whatever is logged."""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import threading
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.logs import JsonFormatter, TextFormatter, add_log_options, log_arguments

FORGED: Final = "x\n2026-01-01 00:00:00,000 ERROR extproc: forged\r\x1b[2J\x85\u2028\x00\ud800"


def record(message: str, *args: object, error: BaseException | None = None, **fields: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.getLogger("extproc.feeds").makeRecord(
        "extproc.feeds", logging.WARNING, "feeds.py", 1, message, args, info, extra=fields
    )
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_a_line_of_json_has_time_level_logger_message_and_fields() -> None:
    line = JsonFormatter().format(record("engine %s is avoided", "a:1", engine="a:1", failures=3))
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "extproc.feeds",
        "message": "engine a:1 is avoided",
        "fields": {"engine": "a:1", "failures": 3},
    }


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_hostile_value_makes_no_line_of_its_own(formatter: logging.Formatter) -> None:
    line = formatter.format(record("tenant %s", FORGED, tenant=FORGED))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_one_line(message: str, field: str) -> None:
    for formatter in (JsonFormatter(), TextFormatter()):
        assert len(formatter.format(record("%s", message, field=field)).splitlines()) == 1
    found = json.loads(JsonFormatter().format(record("%s", message, field=field)))
    assert (found["message"], found["fields"]) == (message, {"field": field})


def test_the_message_of_an_exception_cannot_look_like_a_line() -> None:
    made = record("it failed", error=ValueError(FORGED))
    first, *rest = TextFormatter().format(made).splitlines()
    assert first.endswith("WARNING extproc.feeds: it failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    line = JsonFormatter().format(record("it failed", error=ValueError(FORGED)))
    assert "forged" in json.loads(line)["exception"]
    assert len(line.splitlines()) == 1


def test_long_values_are_cut_and_fields_are_bounded() -> None:
    made = record("%s", "m" * 1_000_000, **{f"field{number}": "v" * 100_000 for number in range(100)})
    found = json.loads(JsonFormatter().format(made))
    assert found["message"].endswith("... (983616 characters more)")
    assert len(found["fields"]) == 64
    assert max(map(len, found["fields"].values())) < 17_000


def test_numbers_that_json_lacks_are_text() -> None:
    found = json.loads(JsonFormatter().format(record("x", cost=float("nan"), most=float("-inf"), none=None, parts=[1])))
    assert found["fields"] == {"cost": "nan", "most": "-inf", "none": None, "parts": "[1]"}


def test_the_options_are_passed_on_to_other_programs() -> None:
    made = argparse.ArgumentParser()
    add_log_options(made)
    options = made.parse_args(["--log-format", "json", "--log-level", "error"])
    assert log_arguments(options) == ("--log-format", "json", "--log-level", "error")
    assert made.parse_args(log_arguments(made.parse_args([]))) == made.parse_args([])


NOBODY_READS: Final = """
import argparse, logging
from extproc.logs import add_log_options, start_logging
made = argparse.ArgumentParser()
add_log_options(made)
start_logging(made.parse_args([]))
for number in range(20_000):
    logging.getLogger("a").info("line %d", number)
print("goes on", flush=True)
input()
logging.getLogger("a").info("the last line")
"""


def test_a_pipe_that_nobody_reads_holds_up_nobody_and_lost_lines_are_counted() -> None:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", NOBODY_READS], text=True, **streams) as process:
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "goes on\n", "it waits for a reader"
        lines, lost = [], 0
        # it is told more than once where the process pauses in the middle
        while len(lines) + lost < 20_000:
            line = process.stderr.readline()
            assert line
            found = re.search(r" (\d+) lines of this log are lost", line)
            if found is None:
                lines.append(line)
            else:
                lost += int(found[1])
        assert lines[0].endswith(" INFO a: line 0\n")
        assert (lost > 0, len(lines) + lost) == (True, 20_000)
        # of the end, none is lost
        assert process.communicate("\n", timeout=60)[1].endswith(" INFO a: the last line\n")
        deadline.cancel()


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    script = NOBODY_READS.replace("input()", "")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **streams) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_process_whose_standard_error_is_closed_runs_without_a_log() -> None:
    script = NOBODY_READS.replace("input()", "")
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


SCRIPT: Final = """
import argparse, logging
from extproc.logs import add_log_options, start_logging
made = argparse.ArgumentParser()
add_log_options(made)
start_logging(made.parse_args(["--log-format", "json", "--log-level", "warning"]), worker=1)
logging.getLogger("a").info("too low")
logging.getLogger("a").warning("seen")
raise RuntimeError("the end")
"""


def test_a_process_logs_from_its_level_on_and_its_own_end_is_a_line_too() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    first, last = map(json.loads, done.stderr.splitlines())
    assert (first["level"], first["message"]) == ("warning", "seen")
    assert first["fields"] == last["fields"] == {"worker": 1}
    assert last["level"] == "critical"
    assert last["exception"].endswith("RuntimeError: the end")
