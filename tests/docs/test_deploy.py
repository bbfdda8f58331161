"""The files of deploy/ fit the code: options exist, probes ask for paths of the server, times are long enough."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "bifolio.service").read_text("utf-8")


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


def kubernetes(kind: str) -> Any:
    return next(document for document in documents("kubernetes.yaml") if document["kind"] == kind)


def check_command(words: list[str]) -> dict[str, Any]:
    """The values that the parser of `bifolio VERB` reads from a command line."""
    from bifolio.cli.main import build_app
    from bifolio.cli.option_values import OptionValues

    command = build_app([words[0]]).verbs[words[0]]
    parser = command.parser(f"bifolio {words[0]}", OptionValues("", {}, {}), in_full=True)  # type: ignore[union-attr]
    values, unknown = parser.parse_known_args(words[1:])
    assert not unknown, f"bifolio {words[0]} has no {unknown}"
    return {name.removeprefix("value_of_"): value for name, value in vars(values).items()}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def unit_value(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


# -- systemd -----------------------------------------------------------------------------------------------------------


def test_the_unit_starts_a_server_and_lets_it_drain() -> None:
    program, *words = shlex.split(unit_value("ExecStart"))
    assert program.endswith("/bin/bifolio")
    values = check_command(words)
    assert values["host"] == "127.0.0.1"
    assert seconds(unit_value("TimeoutStopSec")) > values["drain_timeout"]
    assert unit_value("KillMode") == "mixed"  # the engine ends with its front end, not before it
    key_file = str(values["api_key_file"][0])
    assert key_file == "${CREDENTIALS_DIRECTORY}/" + unit_value("LoadCredential").partition(":")[0]


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    import shutil

    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "bifolio.service"
    unit.write_text(UNIT.replace("/opt/bifolio/bin/bifolio", shutil.which("true") or "/bin/true"))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "bifolio.service" in line] == []


# -- containers --------------------------------------------------------------------------------------------------------


def server_paths() -> set[str]:
    pytest.importorskip("starlette")
    from bifolio.serve.http.app import ROUTES

    return {path for path, method, _ in ROUTES if method == "GET"}


def test_compose_runs_commands_of_bifolio_and_waits_for_the_server() -> None:
    (file,) = documents("compose.yaml")
    services = file["services"]
    values = check_command(services["bifolio"]["command"])
    assert values["host"] == "0.0.0.0"
    assert seconds(services["bifolio"]["stop_grace_period"]) > values["drain_timeout"]
    check_command(services["model"]["command"])
    probe = services["bifolio"]["healthcheck"]["test"][-1]
    assert re.search(r":8000(/\w+)'", probe)[1] in server_paths()  # type: ignore[index]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in file["volumes"] or (DEPLOY / source).exists(), source
    target = services["bifolio"]["build"]["target"]
    assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text("utf-8")


def test_probes_of_kubernetes_ask_for_paths_of_the_server() -> None:
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = check_command(container["args"])
    assert values["port"] == container["ports"][0]["containerPort"]
    check_command(pod["initContainers"][0]["args"])
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/ready",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {probe["path"] for probe in probes.values()} <= server_paths()
    assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > before + values["drain_timeout"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_ray_service_builds_an_application_that_exists() -> None:
    yaml = pytest.importorskip("yaml")
    (service,) = documents("ray-service.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text("utf-8")
    assert re.search(rf"^def {name}\(", source, re.MULTILINE)


def test_images_have_the_version_of_the_package() -> None:
    from bifolio import __version__

    for path in [*DEPLOY.iterdir(), ROOT / "docs" / "deploy.md", ROOT / "docs" / "cluster.md"]:
        for version in re.findall(r"bifolio:(\d+\.\d+\.\d+)", path.read_text("utf-8")):
            assert version == __version__, path.name


# -- proxies -----------------------------------------------------------------------------------------------------------


def defaults() -> dict[str, Any]:
    return check_command(["serve"])


def test_proxies_wait_as_long_as_a_request_may_take_and_do_not_buffer() -> None:
    nginx, caddy = ((DEPLOY / name).read_text("utf-8") for name in ("nginx.conf", "Caddyfile"))
    limit = defaults()["request_timeout"]
    assert float(re.search(r"proxy_read_timeout (\d+)s;", nginx)[1]) >= limit  # type: ignore[index]
    assert float(re.search(r"response_header_timeout (\d+)s", caddy)[1]) >= limit  # type: ignore[index]
    assert "proxy_buffering off;" in nginx
    assert "flush_interval -1" in caddy
    for text, opening in ((nginx, "{"), (caddy, "{")):
        bare = re.sub(r"#.*|\{\$[^}]*\}", "", text)
        assert bare.count(opening) == bare.count("}")


def test_the_table_of_sizes_is_that_of_the_memory_plan() -> None:
    spec = importlib.util.spec_from_file_location("sizes_table", ROOT / "scripts" / "sizes_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    assert module.written(page) == page, "run python scripts/sizes_table.py"


def files_named(page: str) -> Iterator[str]:
    yield from re.findall(r"\]\(\.\./(deploy/[\w.-]+)\)", page)


def test_every_file_of_the_folder_is_explained() -> None:
    named = set(files_named((ROOT / "docs" / "deploy.md").read_text("utf-8")))
    assert named == {f"deploy/{path.name}" for path in DEPLOY.iterdir()}
