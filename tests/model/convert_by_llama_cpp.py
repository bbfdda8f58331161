"""Runs llama.cpp's converter of Hugging Face folders: `convert_by_llama_cpp.py CHECKOUT FOLDER ...`.

Each folder gets a file `model.gguf`, or `failure.txt` where the converter refuses the model. The vocabulary is made up,
since the converter knows real tokenizers only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OLD_NAMES = ("rotary_pct",)  # fields that the converter reads and transformers renames


def set_vocab(model: Any) -> None:
    count = model.hparams["vocab_size"]
    model.gguf_writer.add_tokenizer_model("gpt2")
    model.gguf_writer.add_tokenizer_pre("llama-bpe")
    model.gguf_writer.add_token_list([f"t{number}" for number in range(count)])
    model.gguf_writer.add_token_types([1] * count)
    model.gguf_writer.add_token_merges(["t 1"])


def convert(folder: Path) -> None:
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(folder, False)
    known = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    config = json.loads((folder / "config.json").read_text())
    old = {name: config[name] for name in OLD_NAMES if name in config}
    fields = {"set_vocab": set_vocab, "no_mtp": True, "model_arch": known.model_arch}
    model = type(known.__name__, (known,), fields)(
        folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", hparams={**hparams, **old} if old else None
    )
    model.write()


def main(checkout: str, *folders: str) -> None:
    sys.path[:0] = [checkout, f"{checkout}/gguf-py"]
    import torch

    with torch.inference_mode():
        for name in folders:
            try:
                convert(Path(name))
            except Exception as error:
                Path(name, "failure.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
