"""Open a model reference (folder, file or name), as passed to `--model`, as a `TextModel` or `LoadedModel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bifolio.errors import ConfigError, ModelFileError, did_you_mean
from bifolio.model.loaded import LoadedModel, TextModel
from bifolio.model.model_file import ModelFile
from bifolio.model.references import normalised

MODEL_SUFFIXES = (".gguf", ".bin", ".safetensors")  # of paths; such a name is no reference to a hub


def load_model(reference: str | Path, mmproj: str | Path | None = None) -> LoadedModel:
    """Open a Hugging Face-layout folder, a `.gguf` file, a llama2.c `.bin` file, or a model known by name."""
    return open_model(reference, mmproj).load()


def open_text_model(reference: str | Path, mmproj: str | Path | None = None) -> TextModel:
    """Open a model without its weights."""
    return open_model(reference, mmproj).text


def open_model(reference: str | Path, mmproj: str | Path | None = None) -> ModelFile:
    """Check the headers of a model's files without reading or assembling weights.

    `mmproj`: the file with the tower of a GGUF model, if it does not lie beside it.
    """
    path = resolve(reference)
    if mmproj is not None and path.suffix.lower() != ".gguf":
        raise ConfigError(f"mmproj={str(mmproj)!r} goes with a .gguf file, and {path.name} is none: leave it out")
    if path.is_dir():
        from bifolio.model.huggingface.hf_loader import open_folder

        return open_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        from bifolio.model.gguf.loader import open_gguf_model
        from bifolio.model.registry import recommended_defaults

        opened = open_gguf_model(path, mmproj)
        # Defaults in the file itself take precedence over those recorded for its bytes by `bifolio pull`.
        defaults = {**recommended_defaults(path), **opened.text.generation_config}
        return replace(opened, text=replace(opened.text, generation_config=defaults))
    if suffix == ".bin":
        from bifolio.model.llama2c import open_llama2c

        return open_llama2c(path)
    raise ModelFileError(f"{path}: pass a folder with config.json, a .gguf file or a llama2.c .bin file")


def resolve(reference: str | Path) -> Path:
    """Resolve a reference to a path; names are looked up among the embedded and the pulled models."""
    path = Path(reference).expanduser()
    if path.exists():
        return _file_of(path)
    if isinstance(reference, str):
        from bifolio.model.registry import PULLABLE, find_model, known_names

        found = find_model(reference)
        if found is not None:
            return _file_of(found)
        if reference in PULLABLE or (normalised(reference) is not None and path.suffix not in MODEL_SUFFIXES):
            raise ModelFileError(f"{reference} is not downloaded: fetch it with `bifolio pull {reference}`")
    if isinstance(reference, str) and not any(sign in reference for sign in "/\\") and not path.suffix:
        hint = did_you_mean(reference, [*known_names(), *PULLABLE])
        known = "" if hint else f"; known names: {', '.join(known_names()) or 'none'}"
        raise ModelFileError(f"no model is called {reference!r} and no such file exists{hint}{known}")
    raise ModelFileError(f"{path} does not exist: pass a model folder, a .gguf file or the name of a model")


def _file_of(path: Path) -> Path:
    """The GGUF file of a folder that holds one model in this form; other paths as they are."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    from bifolio.model.gguf.split import only_gguf

    return only_gguf(path) or path
