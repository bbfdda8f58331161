"""`bifolio doctor`: the machine, the kernels, the installed packages, and reasons for slowness."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

from bifolio.cli import commands

HELP = """Describe this machine as bifolio sees it: CPU features, kernels, GPU, memory, versions.

Problems come last, each with its remedy; the exit code is 1 if there is one that makes models slow or fail."""
EPILOG = """Examples:

  bifolio doctor

  bifolio doctor --json | jq .problems"""
PACKAGES = ("numpy", "tokenizers", "gguf", "jinja2", "rich", "torch", "triton", "llguidance", "starlette", "uvicorn",
            "matplotlib")  # fmt: skip
CPU_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_bf16",
             "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve", "fphp")  # fmt: skip
ENOUGH_MEMORY = 1 << 30  # bytes; less is too little for any but the smallest models


def register(app: commands.App) -> None:
    app.command("doctor", help=HELP, epilog=EPILOG)(doctor)


def doctor(as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False) -> None:
    report = examine()
    if as_json:
        commands.echo(json.dumps(report, default=str))
    else:
        show(report)
    if any(problem["slow"] for problem in report["problems"]):
        raise commands.Exit(1)


def examine() -> dict[str, Any]:
    """Everything as JSON fields."""
    from bifolio import __version__
    from bifolio.cli.option_values import config_path, read_config
    from bifolio.engine.host_memory import free_memory
    from bifolio.engine.memory import default_threads
    from bifolio.folders import cache_dir
    from bifolio.model.registry import list_models

    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable_cores": default_threads(), "flags": cpu_flags()},
        "kernels": native_kernels(),
        "gpu": gpus(),
        "memory": {"free_bytes": free_memory()},
        "packages": {name: version_of(name) for name in PACKAGES},
        "cache": str(cache_dir()),
        "config": {"path": str(config_path()), "options": sorted(read_config())},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("BIFOLIO_")},
        "models": [entry.name for entry in list_models() if entry.problem is None],
    }
    report["problems"] = problems(report)
    return report


def cpu_model() -> str:
    for line in _cpuinfo():
        if line.lower().startswith(("model name", "hardware")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def cpu_flags() -> list[str]:
    """The features that the kernels have code for, of those that the CPU has."""
    for line in _cpuinfo():
        if line.lower().startswith(("flags", "features")):
            present = set(line.split(":", 1)[1].split())
            return [flag for flag in CPU_FLAGS if flag in present]
    return []


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def native_kernels() -> dict[str, Any]:
    """The compiled CPU kernels: the instruction set in use, all that would run, or the reason why they are missing."""
    from bifolio.errors import BifolioError
    from bifolio.kernels import cpu

    try:
        return {"native": True, "isa": cpu.isa(), "available": cpu.available_isas()}
    except BifolioError as error:
        return {"native": False, "reason": str(error)}


def gpus() -> dict[str, Any]:
    """GPUs that torch can use, and GPUs of the system that it cannot."""
    device_nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if importlib.util.find_spec("torch") is None:
        return {"devices": [], "system": device_nodes, "reason": "torch is not installed"}
    import torch

    if not torch.cuda.is_available():
        return {"devices": [], "system": device_nodes, "reason": f"torch {torch.__version__} finds no CUDA device"}
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"devices": names, "system": device_nodes, "reason": None}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def problems(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Reasons for slowness and failure, with remedies; `slow` marks those that matter for every model."""
    found: list[dict[str, Any]] = []

    def add(text: str, slow: bool = False) -> None:
        found.append({"text": text, "slow": slow})

    kernels, cpu, gpu = report["kernels"], report["cpu"], report["gpu"]
    if not kernels["native"]:
        add(f"the CPU runs on slow kernels: {kernels['reason']}", slow=True)
    elif kernels["available"] and kernels["isa"] != kernels["available"][0]:
        add(f"BIFOLIO_ISA={kernels['isa']} is slower than {kernels['available'][0]}: unset it", slow=True)
    if forced := os.environ.get("BIFOLIO_KERNELS"):
        add(f"BIFOLIO_KERNELS={forced} replaces the choice of kernels: unset it", slow=forced in ("reference", "torch"))
    if gpu["system"] and not gpu["devices"]:
        add(
            f"there is a GPU ({', '.join(gpu['system'])}) that is not used: {gpu['reason']}; pip install 'bifolio[gpu]'"
        )
    if cpu["cores"] and cpu["usable_cores"] < cpu["cores"]:
        add(f"this process may use {cpu['usable_cores']} of {cpu['cores']} cores (affinity of the process)")
    if report["memory"]["free_bytes"] < ENOUGH_MEMORY:
        add(f"only {report['memory']['free_bytes'] / 1e6:.0f} MB of memory are free: end other programs", slow=True)
    if report["packages"]["llguidance"] is None:
        add("structured output needs llguidance: pip install 'bifolio[serve]'")
    return found


def show(report: dict[str, Any]) -> None:
    from bifolio.engine.memory import show_bytes

    kernels, cpu, gpu = report["kernels"], report["cpu"], report["gpu"]
    native = f"native, {kernels['isa']} (of {', '.join(kernels['available'])})" if kernels["native"] else "slow"
    packages = [f"{name} {version}" for name, version in report["packages"].items() if version]
    missing = [name for name, version in report["packages"].items() if not version]
    lines = {
        "bifolio": f"{report['version']}, Python {report['python']}, {report['system']}",
        "CPU": f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores, {' '.join(cpu['flags']) or 'no flags'}",
        "kernels": native,
        "GPU": ", ".join(gpu["devices"]) or f"none ({gpu['reason']})",
        "memory": f"{show_bytes(report['memory']['free_bytes'])} free",
        "packages": ", ".join(packages) + (f"; not installed: {', '.join(missing)}" if missing else ""),
        "cache": report["cache"],
        "config": report["config"]["path"] + ("" if report["config"]["options"] else " (none)"),
        "models": ", ".join(report["models"]),
    }
    for name, text in lines.items():
        commands.echo(f"{name:<10} {text}")
    for problem in report["problems"]:
        commands.echo(f"{'slow' if problem['slow'] else 'note':<10} {problem['text']}")
    if not report["problems"]:
        commands.echo("no problems found")
