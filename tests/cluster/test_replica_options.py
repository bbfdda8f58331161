"""Options of `bifolio serve --replicas` and `bifolio cluster`, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.errors import ConfigError, MissingDependencyError
from cli_runner import CliRunner


@pytest.mark.parametrize("option", [["--role", "prefill"], ["--kv-events", "tcp://127.0.0.1:5557"]])
def test_options_that_do_not_go_with_replicas_are_refused(option: list[str], tmp_path: Path) -> None:
    for replicas in (["--replicas", "2"], ["--prefill-replicas", "1"]):
        done = CliRunner().invoke(build_app(["serve"]), ["serve", *replicas, *option])
        assert isinstance(done.exception, ConfigError)
        assert "--replicas" in str(done.exception)


@pytest.mark.parametrize("command", [["serve", "--replicas", "2"], ["cluster", "status"], ["cluster", "deploy"]])
def test_without_ray_the_extra_is_named(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("bifolio.cluster.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(build_app([command[0]]), command)
    assert isinstance(done.exception, MissingDependencyError)
    assert "bifolio[cluster]" in str(done.exception)
