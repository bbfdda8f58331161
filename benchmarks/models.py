"""Models by name: files with random weights, written once, and real files that are found.

S-q4_0          the shape S in a GGUF file of this format       S-q4_0.gguf
llama-1b        a shape in a folder in bf16                     llama-1b/
T-awq           the shape T in a quantised folder               T-awq/
llama-1b-lora   a shape in a folder in bf16, with 64 adapters   llama-1b-lora/
smollm2-q4_k_m  a real model, converted by the product's writer from the file that is there
gemma-270m      a real file                                     gemma-3-270m.Q4_K_M.gguf
stories         an embedded model
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bifolio.errors import ConfigError, ModelFileError

# Real files: the name in rows, and the names that the file may have.
FILES = {
    "smollm2-q4_1": ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"),
    "gemma-270m": ("gemma-3-270m.Q4_K_M.gguf",),
    "qwen2.5-coder-1.5b": ("qwen2.5-coder-1.5b.Q4_K_M.gguf",),
    "tinyllama-iq2_xxs": ("tinyllama-1.1b.IQ2_XXS.gguf",),
    "minilm": ("all-MiniLM-L6-v2",),  # a folder
    "minilm-q8_0": ("all-MiniLM-L6-v2.Q8_0.gguf",),
}
CONVERTED = {"smollm2": "smollm2-q4_1"}  # written from this file in the format that the name ends with
EMBEDDED = ("stories", "stories-draft")
QUANTISED = ("fp8", "awq", "gptq")
ADAPTED, ADAPTERS = "lora", 64  # a format of names: folders with so many low-rank adapters


@dataclass(frozen=True)
class ModelStore:
    """A folder with models, which grows; `tiny` models have the same architecture and few small layers."""

    folder: Path
    tiny: bool = False

    def path(self, name: str) -> Path | str:
        """The file or folder of a model, written if it has random weights and is not there yet."""
        if name in EMBEDDED:
            return name
        if name in FILES and not self.tiny:
            return self._found(name)
        path = self.folder / ("tiny" if self.tiny else ".") / file_name(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(name, path)
        return path

    def _found(self, name: str) -> Path:
        for folder in (self.folder, Path.cwd(), Path(os.environ.get("BIFOLIO_TEST_MODELS") or ".")):
            for file in FILES[name]:
                if (folder / file).exists():
                    return folder / file
        raise ModelFileError(f"{name} is not here: put {' or '.join(FILES[name])} into {self.folder}")

    def _write(self, name: str, path: Path) -> None:
        from benchmarks.random_files import mix_of, write_model
        from benchmarks.shapes import SHAPES, tiny

        shape, format = split_name(name)
        if shape in CONVERTED and not self.tiny:
            from bifolio.model.gguf.writer import write_gguf
            from bifolio.model.loader import load_model

            write_gguf(path, load_model(self._found(CONVERTED[shape])), mix_of(format))
            return
        config = SHAPES["S"] if shape not in SHAPES and self.tiny else SHAPES.get(shape)
        if config is None:
            raise ConfigError(f"there is no model {name!r}: `python -m benchmarks list` names those of all rows")
        config = tiny(config) if self.tiny else config
        if format == ADAPTED:
            from benchmarks import engines
            from benchmarks.random_adapters import write_adapters

            write_model(path, config, "bf16")
            write_adapters(path / engines.ADAPTERS, config, ADAPTERS)
        elif format in QUANTISED:
            from benchmarks.quantised_folders import write_quantised

            write_quantised(path, config, format)
        else:
            write_model(path, config, format)


def split_name(name: str) -> tuple[str, str]:
    """`S-q4_0` -> (S, q4_0); a name without a format is a folder in bf16."""
    from benchmarks.random_files import LOW_BITS
    from bifolio.model.gguf.mixes import MIXES

    shape, _, format = name.rpartition("-")
    known = format in (*MIXES, "q4_k", *LOW_BITS, *QUANTISED, ADAPTED)
    return (shape, format) if shape and known else (name, "bf16")


def file_name(name: str) -> str:
    _, format = split_name(name)
    is_file = name != split_name(name)[0] and format not in (*QUANTISED, ADAPTED)
    return f"{name}.gguf" if is_file or name in FILES else name
