# SPDX-License-Identifier: Apache-2.0
"""Which programs ``attache serve`` runs, and with which options."""

from __future__ import annotations

import itertools
import stat
import sys
from pathlib import Path

import httpx
import pytest

from attache.serve import TOKEN_FILE, ServePlan, main, make_token, parser, plan_programs
from bench.stack.processes import Processes, free_ports
from extproc.api.authentication import Authentication, VirtualKeys
from extproc.api.gateway_config import GatewayConfigSpec, UsageLog
from tests.waiting import eventually


def plan(*words: str) -> ServePlan:
    options = parser().parse_args(["--config", "config", *words])
    gateway = GatewayConfigSpec(usage_log=UsageLog(path="/var/lib/attache/usage.log"))
    return plan_programs(options, gateway, Path("envoy"), Path("bundle"))


@pytest.mark.parametrize(
    ("words", "has_reports"),
    [
        ((), True),
        (("--usage-store", "postgresql://db/usage"), True),
        # rows without sums: nobody could answer
        (("--usage-store", "jsonl:/var/lib/attache/rows"), False),
        (("--usage-admin", "off"), False),
    ],
)
def test_extproc_asks_for_usage_where_there_are_reports(words: tuple[str, ...], *, has_reports: bool) -> None:
    assert ("--usage-api" in plan(*words).extproc.command) is has_reports


def test_the_store_is_named_only_if_the_operator_does() -> None:
    """A path may have characters that mean something in a URL."""
    assert [
        one.usage is not None and "--store" in one.usage.command for one in (plan(), plan("--usage-store", "x"))
    ] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("words", "keys", "tenants"),
    [((), "", ""), (("--usage-admin-keys", "ops,audit", "--usage-admin-tenants", "platform"), "ops,audit", "platform")],
)
def test_the_usage_process_is_told_who_sees_the_usage_of_all(words: tuple[str, ...], keys: str, tenants: str) -> None:
    usage = plan(*words).usage
    assert usage is not None
    after = dict(itertools.pairwise(usage.command))
    assert (after["--admin-keys"], after["--admin-tenants"]) == (keys, tenants)


def plan_with_keys(*words: str, secret: str | None = None, config: str = "config") -> ServePlan:
    options = parser().parse_args(["--config", config, *words])
    gateway = GatewayConfigSpec(authentication=Authentication(virtual_keys=VirtualKeys(secret=secret)))
    return plan_programs(options, gateway, Path("envoy"), Path("bundle"))


def test_virtual_keys_have_an_api_where_the_directory_keeps_them() -> None:
    assert plan().keys is None
    assert plan_with_keys(secret="attache-keys").keys is None  # noqa: S106 - a name
    assert plan_with_keys("--keys-admin", "off").keys is None
    found = plan_with_keys("--log-format", "json")
    assert found.keys is not None
    assert found.keys.command[3:13] == (
        *("keys", "serve", "--config", "config", "--listen", "127.0.0.1:9011"),
        *("--token-file", f"config/{TOKEN_FILE}", "--log-format", "json"),
    )
    assert ("127.0.0.1:9011", "--keys-admin") in found.taken
    own = plan_with_keys("--keys-token-file", "mine").keys
    assert own is not None
    assert own.command[own.command.index("--token-file") + 1] == "mine"


def test_the_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / TOKEN_FILE
    assert make_token(file)
    first = file.read_text()
    assert len(first.strip()) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not make_token(file)
    assert file.read_text() == first
    with pytest.raises(OSError, match="No such file"):
        make_token(tmp_path / "missing" / TOKEN_FILE)


def test_nothing_starts_without_the_package_of_the_usage_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{{usageLog: {{path: {tmp_path}/usage/usage.log}}}}"
    (tmp_path / "a.yaml").write_text(
        f"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {{name: g}}\nspec: {spec}\n"
    )
    monkeypatch.setattr("attache.serve.find_envoy", lambda: Path("envoy"))
    monkeypatch.setattr("attache.serve.find_spec", lambda _: None)
    assert main(["--config", str(tmp_path)]) == 2
    assert "run: pip install 'attache[usage]'" in capsys.readouterr().err
    assert not (tmp_path / "usage").exists()


async def test_the_api_of_keys_answers_who_has_the_token(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    planned = plan_with_keys("--keys-admin", f"127.0.0.1:{port}", config=str(tmp_path)).keys
    assert planned is not None
    make_token(tmp_path / TOKEN_FILE)
    token = (tmp_path / TOKEN_FILE).read_text().strip()
    url = f"http://127.0.0.1:{port}/v1/keys"
    async with Processes(tmp_path) as processes, httpx.AsyncClient() as http:
        await processes.start("keys", [sys.executable, *planned.command[1:]])

        async def answers() -> bool:
            try:
                return (await http.get(url)).status_code == 401
            except httpx.TransportError:
                return False

        await eventually(answers)
        bearer = {"authorization": f"Bearer {token}"}
        assert (await http.get(url, headers=bearer)).json() == {"keys": []}
