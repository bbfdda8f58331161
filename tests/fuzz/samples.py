"""Small valid files of every kind that a model consists of, and the way each is opened and used."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from json_samples import CONFIG, FAMILY_CONFIGS, TOKENIZERS

from bifolio.config import ModelConfig, RopeConfig, layers_of
from bifolio.errors import GrammarError
from bifolio.model.families import family_of
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.hf_loader import load_folder, read_json
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.llama2c import load_llama2c
from bifolio.model.loaded import LoadedModel, TextModel
from bifolio.model.tensor_names import assemble
from bifolio.model.weights import inverse_frequencies
from bifolio.quant import QuantFormat, QuantizedTensor
from bifolio.sampling.grammar import Grammar, compile_grammar
from bifolio.sampling_params import SamplingParams
from bifolio.text.tokenizer import Tokenizer
from helpers import drain, make_engine, tiny_folder

TEXT = "Hello, world! 123 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab \u00e9\U0001f642 <s></s>"


@dataclass(frozen=True)
class Sample:
    """A whole file and the way it is opened."""

    name: str
    content: bytes
    file_name: str
    open: Callable[[Path], None]
    header_bytes: int = 0  # mutations stay inside of these; 0: the file is JSON

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def samples(folder: Path) -> list[Sample]:
    """Files of every kind, with vocabularies, several formats and ropes."""
    made = [*_gguf_samples(folder), *_tensor_samples(folder)]
    made.append(Sample("config/tiny", json.dumps(CONFIG).encode(), "config.json", _open_folder))
    made += [
        Sample(f"config/{name}", json.dumps(raw).encode(), "config.json", _open_config)
        for name, raw in FAMILY_CONFIGS.items()
    ]
    made += [
        Sample(f"tokenizer/{name}", json.dumps(raw).encode(), "tokenizer.json", _open_tokenizer)
        for name, raw in TOKENIZERS().items()
    ]
    return made


def _gguf_samples(folder: Path) -> list[Sample]:
    made = []
    for name, format in (("llama", QuantFormat.F32), ("qwen3", QuantFormat.Q8_0), ("gpt2", QuantFormat.F16),
                         ("gemma3", QuantFormat.Q4_0), ("phi3", QuantFormat.Q4_1)):  # fmt: skip
        path = folder / f"{name}.gguf"
        write_gguf(path, _random_model(name), format)
        made.append(Sample(f"gguf/{name}", path.read_bytes(), "case.gguf", _open_gguf, open_gguf(path).data_start))
    return made


def _tensor_samples(folder: Path) -> list[Sample]:
    tensors = {f"t{i}.weight": np.ones((3 + i, 8), np.float32) for i in range(6)}
    half = {"half": QuantizedTensor.quantize(np.ones((2, 4), np.float32), QuantFormat.BF16)}
    write_safetensors(folder / "x.safetensors", {**tensors, **half}, {"format": "pt"})
    content = (folder / "x.safetensors").read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    whole = (tiny_folder() / "model.safetensors").read_bytes()
    whole_size = 8 + int.from_bytes(whole[:8], "little")
    return [
        Sample("safetensors/tensors", content, "case.safetensors", _open_safetensors, size),
        Sample("safetensors/model", whole, "model.safetensors", _open_folder, whole_size),
        Sample("llama2.c/model", _llama2c_bytes(), "case.bin", _open_llama2c, 28),
    ]


# -- opening -----------------------------------------------------------------------------------------------------------
def _open_gguf(path: Path) -> None:
    _touch(load_gguf(path))


def _open_llama2c(path: Path) -> None:
    _touch(load_llama2c(path))


def _open_safetensors(path: Path) -> None:
    tensors = open_safetensors(path).tensors
    for name in tensors:
        tensors[name].dequantize_rows(slice(0, 1))


def _open_folder(path: Path) -> None:
    """Load the folder of the file, which has the other files of a tiny model, and generate a token."""
    folder = path.parent
    for name, content in _tiny_files().items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    engine = make_engine(load_folder(folder), num_blocks=16, max_model_len=32, poison=False)
    engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=2, temperature=0.0))
    drain(engine)


def _open_config(path: Path) -> None:
    config = config_from_hf(read_json(path))
    for rope in config.ropes:
        inverse_frequencies(rope)


def _open_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.from_file(path)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    tokenizer.decode([0, 1, 2, tokenizer.vocab_size - 1, tokenizer.vocab_size, (1 << 32) - 1])
    tokenizer.encode_parts([(TEXT, False), ("<s>", True)])
    model = TextModel(
        path=path, config=config_from_hf({**CONFIG, "vocab_size": 512}), tokenizer_source=lambda: tokenizer
    )
    with contextlib.suppress(GrammarError):  # llguidance does not read every tokenizer
        compile_grammar(Grammar.choice(["yes", "no"]), model)


def _tiny_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in TINY_FOLDER.iterdir()}


TINY_FOLDER = tiny_folder()


def _touch(model: LoadedModel) -> None:
    """The first and the last byte of the matrices, and the tokenizer."""
    for layer in model.weights.layers:
        for part in (*layer.qkv.parts, *layer.up.parts, *layer.down.parts):
            part.dequantize_rows(np.array([0, part.num_rows - 1]))
    if model.tokenizer is not None:
        model.tokenizer.decode(model.tokenizer.encode(TEXT))


# -- making ------------------------------------------------------------------------------------------------------------
def _random_model(architecture: str) -> LoadedModel:
    gpt2, gemma = architecture == "gpt2", architecture == "gemma3"
    factors = tuple(1.0 + i for i in range(8))
    plain = RopeConfig(10000.0, 16)
    ropes = {
        "llama": (RopeConfig(10000.0, 16, frequency_factors=factors),),
        "phi3": (RopeConfig(10000.0, 16, "longrope", 2.0, 64, frequency_factors=factors),),
        "gemma3": (RopeConfig(1e6, 16, "linear", 8.0), plain),
        "gpt2": (),
    }.get(architecture, (RopeConfig(10000.0, 16, "yarn", 4.0, 32),))
    config = ModelConfig(
        architecture, 270, 32, 2, 2, 2 if gpt2 else 1, 16, 64, 128,
        norm="layer" if gpt2 else "rms", activation="gelu_tanh" if gpt2 or gemma else "silu", gated_mlp=not gpt2,
        qkv_bias=gpt2, output_bias=gpt2, mlp_bias=gpt2, qk_norm=architecture in ("qwen3", "gemma3"), post_norms=gemma,
        tie_embeddings=gpt2, learned_positions=gpt2, ropes=ropes, rope_interleaved=architecture == "llama",
        layers=layers_of(2, rope=(1, 0), window=(8, None)) if gemma else (), bos_token_id=256, eos_token_ids=(257,),
        embedding_scale=32**0.5 if gemma else 1.0,
    )  # fmt: skip
    generator = np.random.default_rng(0)

    def vector(name: str, shape: tuple[int, ...]) -> Any:
        return generator.standard_normal(shape).astype(np.float32)

    def matrix(name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return QuantizedTensor.from_array(vector(name, shape))

    weights = assemble(config, family_of(config).gguf_names, matrix, vector)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return LoadedModel(
        Path("random"), config, _tokenizer, chat_template="{{ x }}", special_tokens=tokens, weights=weights
    )


def _tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257, "He": 258, "ll": 259, "Hell": 260}
    backend = Backend(models.BPE(vocabulary, [("H", "e"), ("l", "l"), ("He", "ll")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend)


def _llama2c_bytes() -> bytes:
    d, ffn, layers, kv, vocabulary = 16, 24, 2, 8, 40
    count = vocabulary * d + layers * (2 * d + 2 * d * d + 2 * kv * d + 3 * ffn * d) + d
    return struct.pack("<7i", d, ffn, layers, 4, 2, vocabulary, 16) + bytes(4 * count)
