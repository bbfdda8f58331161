"""Adapters of llama.cpp: a GGUF file of type `adapter`.

    blk.0.attn_q.weight.lora_a   [r, in]    of experts [count, r, in]
    blk.0.attn_q.weight.lora_b   [out, r]
    token_embd.weight.lora_a     [vocab, r]
    token_embd.weight.lora_b     [d, r]

The change of a tensor is lora_b @ lora_a * alpha / r; alpha 0 stands for r.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.adapters.delta import Changes, Delta
from bifolio.model.adapters.peft_folder import dense
from bifolio.model.gguf.reader import GgufFile, open_gguf
from bifolio.model.plain_values import is_number

SIDES = (".lora_a", ".lora_b")
TABLE = "token_embd.weight"


def read_gguf_adapter(path: Path, architectures: tuple[str, ...]) -> Changes:
    """The changes of an adapter file, by the names of GGUF files; `architectures`: of files of the base."""
    file = open_gguf(path)
    alpha = _checked_alpha(file, path, architectures)
    names = {name.removesuffix(side) for name in file.entries for side in SIDES if name.endswith(side)}
    strange = [name for name in file.entries if not name.endswith(SIDES)]
    if strange or not names:
        found = f"the tensor {strange[0]!r}" if strange else "no tensor"
        raise ModelFileError(f"{path} holds {found} where an adapter has pairs .lora_a and .lora_b: convert it again")
    deltas = []
    for name in sorted(names):
        missing = [side for side in SIDES if name + side not in file.entries]
        if missing:
            raise ModelFileError(f"{path}: {name!r} lacks {missing[0]}: convert the adapter again")
        down, up = (dense(file.tensor(name + side)) for side in SIDES)
        rank = up.shape[-1]
        if name == TABLE:
            down, up = np.ascontiguousarray(up.T), down
        deltas.append(Delta(name, down, up).scaled(alpha / rank if alpha and rank else 1.0))
    return Changes(deltas)


def _checked_alpha(file: GgufFile, path: Path, architectures: tuple[str, ...]) -> float:
    data = file.metadata
    kind, form = data.get("general.type"), data.get("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelFileError(f"{path} is a GGUF file of type {kind!r}, {form!r}: an adapter has 'adapter', 'lora'")
    if data.get("adapter.alora.invocation_tokens") is not None:
        raise UnsupportedModelError(f"{path}: activated LoRA, which begins at certain tokens, is not supported")
    base = data.get("general.architecture")
    if base not in architectures:
        raise ModelFileError(
            f"{path} changes a {base!r} model and the base is one of {', '.join(map(repr, architectures))}: "
            "use the adapter's own base"
        )
    alpha = data.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not is_number(alpha):
        raise ModelFileError(f"{path}: adapter.lora.alpha is {alpha!r}: it must be a number")
    return float(alpha)
