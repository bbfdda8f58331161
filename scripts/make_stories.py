"""Generate a training corpus with a small story model: thousands of stories at a time, with a static KV cache.

    python scripts/make_stories.py pack stories15M.bin teacher/         # a llama2.c model as a float16 folder
    python scripts/make_stories.py write teacher/ stories.txt --seconds 180 --batch 8192

Only stories that end with an end-of-text token are kept, without duplicates. They are separated by <|endoftext|>.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.api.language_model import LanguageModel
from bifolio.kernels.interface import Batch, Heads
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.model import transformer
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.weights import prepare
from bifolio.text.tokenizer import Tokenizer
from bifolio.train.data import END_OF_TEXT

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.8, 1.0
SMALLEST_PROBABILITY = 0.02  # min-p: relative to the most likely token; less likely tokens are mostly noise
SHORTEST_STORY = 200  # characters
STEPS_BETWEEN_CHECKS = 32  # the check whether all stories have ended synchronises with the device
ENDING = re.compile(r"[.!?][\"']?$")


class StaticCacheKernels(TorchKernels):
    """Decoding of many equally long sequences in lockstep; keys and values are one array per layer."""

    def __init__(self, model: LanguageModel, num_sequences: int, length: int, device: str, dtype: str) -> None:
        super().__init__(device, dtype)
        config = model.config
        shape = (num_sequences, config.num_kv_heads, length, config.head_dim)
        self.keys = [torch.empty(shape, dtype=self.dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=self.dtype, device=device) for _ in range(config.num_layers)]
        self.position = 0

    def rope_and_write(self, qkv: Any, shape: Any, rotation: Any, batch: Batch, storage: Any) -> Heads:
        heads = super().rope_and_write(qkv, shape, rotation, batch, None)
        self.keys[shape.layer][:, :, self.position] = heads.key
        self.values[shape.layer][:, :, self.position] = heads.value
        return heads

    def attend(self, heads: Heads, shape: Any, segments: Any, storage: Any) -> torch.Tensor:
        keys = self.keys[shape.layer][:, :, : self.position + 1]
        values = self.values[shape.layer][:, :, : self.position + 1]
        grouped = shape.num_heads != shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            heads.query[:, :, None], keys, values, scale=shape.scale, enable_gqa=grouped
        )
        return mixed.flatten(1)


class StoryWriter:
    """Samples batches of token sequences from a model."""

    def __init__(self, folder: Path, num_sequences: int, device: str) -> None:
        self.model = LanguageModel.from_pretrained(folder).to(device).eval()
        self.length = self.model.config.max_position
        dtype = "bf16" if device.startswith("cuda") else "f32"
        self.kernels = StaticCacheKernels(self.model, num_sequences, self.length, device, dtype)
        with torch.no_grad():
            self.weights = prepare(self.model.weights(), self.kernels)
        self.num_sequences, self.device = num_sequences, device
        begin = self.model.config.bos_token_id
        self.begin = 1 if begin is None else begin
        self.ends = torch.tensor([self.begin, *self.model.config.eos_token_ids], device=device)

    @torch.no_grad()
    def write(self, seed: int) -> np.ndarray:
        """i32[num_sequences, length]: begin-of-text, a story, end-of-text if it was sampled, and unused tokens."""
        generator = torch.Generator(self.device).manual_seed(seed)
        rows = torch.zeros((self.num_sequences, self.length), dtype=torch.int64, device=self.device)
        rows[:, 0] = self.begin
        spread = torch.rand((self.num_sequences, 1), generator=generator, device=self.device)
        temperatures = LOWEST_TEMPERATURE + (HIGHEST_TEMPERATURE - LOWEST_TEMPERATURE) * spread
        ended = torch.zeros(self.num_sequences, dtype=torch.bool, device=self.device)
        for position in range(self.length - 1):
            self.kernels.position = position
            positions = torch.full((self.num_sequences,), position, device=self.device)
            batch = Batch(rows[:, position], positions, None, (), None, position)
            logits = transformer.forward(self.weights, batch, self.kernels, None)
            chosen = _draw(logits, temperatures, generator)
            rows[:, position + 1] = chosen
            ended |= torch.isin(chosen, self.ends)
            if position % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1 and bool(ended.all()):
                break
        return rows.to(torch.int32).cpu().numpy()

    def stories(self, rows: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
        """The texts of the sequences that have an end-of-text token."""
        is_end = np.isin(rows[:, 1:], self.ends.cpu().numpy())
        finished = np.flatnonzero(is_end.any(axis=1))
        ends = is_end.argmax(axis=1) + 1
        tokens = [rows[i, 1 : ends[i]].tolist() for i in finished]
        for text in tokenizer.backend.decode_batch(tokens, skip_special_tokens=True):
            yield text.strip()


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sample one token per row by the Gumbel-max method, with a minimum probability."""
    weights = (logits / temperatures).softmax(dim=-1)
    weights.masked_fill_(weights < SMALLEST_PROBABILITY * weights.amax(dim=-1, keepdim=True), 0.0)
    return weights.div_(torch.empty_like(weights).exponential_(generator=generator)).argmax(dim=-1)


def is_good(story: str) -> bool:
    """Whether a story is long enough, plain text, and ends with a complete sentence."""
    return len(story) >= SHORTEST_STORY and story.isascii() and bool(ENDING.search(story))


def write_corpus(
    folder: Path, output: Path, *, seconds: float, max_stories: int, num_sequences: int, device: str, seed: int = 0
) -> dict[str, float]:
    """Generate until the time limit or the wanted number of stories; return the counts."""
    writer = StoryWriter(folder, num_sequences, device)
    loaded = load_folder(folder)
    tokenizer = loaded.require_tokenizer()
    began, seen, num_drawn, num_tokens = time.monotonic(), set[int](), 0, 0
    with output.open("w", encoding="utf-8") as file, ThreadPoolExecutor(1) as background:

        def keep(rows: np.ndarray) -> None:
            for story in writer.stories(rows, tokenizer):
                if is_good(story) and hash(story) not in seen and len(seen) < max_stories:
                    seen.add(hash(story))
                    file.write(story + "\n" + END_OF_TEXT + "\n")

        keeping: Future[None] | None = None
        while time.monotonic() - began < seconds and len(seen) < max_stories:
            rows = writer.write(seed + num_drawn)
            num_drawn += len(rows)
            num_tokens += rows.size
            if keeping is not None:
                keeping.result()
            keeping = background.submit(keep, rows)  # detokenised while the device generates the next batch
            speed = num_tokens / (time.monotonic() - began)
            print(f"{len(seen):,} stories kept of {num_drawn:,}; {speed:,.0f} tokens/s", flush=True)
    return {"stories": len(seen), "drawn": num_drawn, "bytes": output.stat().st_size}


def pack(model: str, folder: Path) -> None:
    """Convert a Llama-like model that bifolio loads to a float16 folder in the Hugging Face layout."""
    from dataclasses import replace

    from bifolio.model.export import named_tensors
    from bifolio.model.families import family_of
    from bifolio.model.huggingface.config import config_to_hf
    from bifolio.model.huggingface.safetensors_file import write_safetensors
    from bifolio.model.loader import load_model
    from bifolio.quant.formats import QuantFormat

    loaded = load_model(model)
    config = replace(loaded.config, rope_interleaved=False)
    tensors = {
        entry.name: entry.rearranged().converted(QuantFormat.F16)
        for entry in named_tensors(loaded.weights, family_of(config).hf_names, interleaved=False)
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, "float16"), indent=2) + "\n")
    loaded.require_tokenizer().backend.save(str(folder / "tokenizer.json"))


def main(arguments: list[str]) -> int:
    if len(arguments) == 3 and arguments[0] == "pack":
        pack(arguments[1], Path(arguments[2]))
        return 0
    if len(arguments) < 3 or arguments[0] != "write":
        print(__doc__)
        return 1
    options = {"seconds": "180", "stories": "100000000", "batch": "8192", "seed": "0",
               "device": "cuda" if torch.cuda.is_available() else "cpu"}  # fmt: skip
    pairs = zip(arguments[3::2], arguments[4::2], strict=True)
    options |= {flag.removeprefix("--"): value for flag, value in pairs}
    counts = write_corpus(
        Path(arguments[1]),
        Path(arguments[2]),
        seconds=float(options["seconds"]),
        max_stories=int(options["stories"]),
        num_sequences=int(options["batch"]),
        device=options["device"],
        seed=int(options["seed"]),
    )
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
