"""Requests with images on a GPU: a model in the shape of Qwen3-VL-8B with random weights, through `LLM` on its folder.

    python -m benchmarks.tools.gpu_images --models /dev/shm/models      # rows of JSON
    python -m benchmarks.tools.gpu_images --tiny --device torch         # without a GPU

The first row has the time to the first token of a prompt with a new image of 560×560 pixels, as a PNG and decoded, and
of a prompt with as many tokens of text; each also a second time, which finds its prefix in the cache. The next are 64
requests, each with an image of its own and 128 new tokens, and the same number of requests with text in their place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_files import write_tokenizer
from benchmarks.tools.first_token_of_an_image import picture
from bifolio import LLM, SamplingParams

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIZES: dict[str, dict[str, Any]] = {
    "text": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "tower": {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16,
              "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "text": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 600},
    "tower": {"hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 4, "patch_size": 16,
              "out_hidden_size": 64, "num_position_embeddings": 2304, "deepstack_visual_indexes": [1, 2, 3]},
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def write_model(folder: Path, sizes: dict[str, dict[str, Any]], device: str) -> None:
    """A folder with random weights in bf16, drawn on the device."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True)
    vocab = sizes["text"]["vocab_size"]
    write_tokenizer(folder, vocab - len(MARKS))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids: list[Any] = [tokenizer.token_to_id(mark) for mark in MARKS]
    section = sizes["text"]["head_dim"] // 8
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
            "mrope_section": [4 * section - 2 * (3 * section // 2), 3 * section // 2, 3 * section // 2]}  # fmt: skip
    config = Qwen3VLConfig(
        text_config={**sizes["text"], "rope_parameters": rope, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        vision_config=sizes["tower"], vision_start_token_id=ids[0], vision_end_token_id=ids[1], image_token_id=ids[2],
        video_token_id=ids[3], architectures=["Qwen3VLForConditionalGeneration"], dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen3VLForConditionalGeneration(config).named_parameters()}
    place, kind = "cpu" if device == "torch" else device, torch.bfloat16
    tensors = {
        name: torch.ones(shape, dtype=kind) if len(shape) == 1
        else torch.empty(shape, dtype=kind, device=place).normal_(0, shape[-1] ** -0.5).cpu()
        for name, shape in shapes.items()
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def with_image(seed: int, edge: int) -> dict[str, Any]:
    import io

    import PIL.Image

    prompt = f"{MARKS[0]}{MARKS[2]}{MARKS[1]}"
    return {"prompt": prompt, "multi_modal_data": {"image": PIL.Image.open(io.BytesIO(picture(edge, seed)))}}


def with_text(seed: int, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": np.random.default_rng(seed).integers(20, 500, length).tolist()}


def first_tokens(llm: LLM, rounds: int, edge: int) -> dict[str, Any]:
    """Medians of milliseconds to the first token of a new prompt, and of the same prompt again.

    Of images that are files, and of decoded ones (`pixels`).
    """
    one, length = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False), 0
    names = ("image", "pixels", "text")
    times: dict[str, list[float]] = {key: [] for name in names for key in (name, f"{name}_again")}
    for number in range(rounds + 2):
        prompts = {"image": with_image(number, edge), "pixels": with_image(500 + number, edge)}
        prompts["pixels"]["multi_modal_data"]["image"].load()
        prompts |= {"text": with_text(number, length)} if length else {}
        for name, prompt in prompts.items():
            for key in (name, f"{name}_again"):
                began = time.perf_counter()
                (output,) = llm.generate([prompt], one, use_tqdm=False)
                if number > 1:
                    times[key].append(time.perf_counter() - began)
            length = len(output.prompt_token_ids)
    found = {f"{key}_ms": round(1e3 * statistics.median(own), 2) for key, own in times.items()}
    return {"row": "first token", "pixels": edge, "prompt_tokens": length, **found}


def crowd(llm: LLM, count: int, new: int, edge: int, seed: int) -> dict[str, Any]:
    """Output tokens per second of requests with images, and of as many tokens of text."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    images = [with_image(seed + number, edge) for number in range(count)]
    rates, length = {}, 0
    for name in ("image", "text"):
        prompts = images if name == "image" else [with_text(seed + number, length) for number in range(count)]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rates[f"{name}_tokens_per_s"] = round(count * new / (time.perf_counter() - began))
        assert all(output.error is None for output in outputs)
        length = len(outputs[0].prompt_token_ids)
    return {"row": "crowd", "requests": count, "new": new, "prompt_tokens": length, **rates}


def open_model(models: Path, device: str, *, tiny: bool, warm_up: bool = True) -> LLM:
    """The model, whose folder is written first where there is none."""
    folder = models / f"qwen3-vl-{'tiny' if tiny else '8b'}"
    if not folder.exists():
        write_model(folder, TINY if tiny else SIZES, device)
    own: dict[str, Any] = {"kernels": "torch"} if device == "torch" else {"device": device}
    return LLM(folder, max_model_len=2048, warm_up=warm_up, **own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for the model")
    parser.add_argument("--device", default="cuda", help="cuda, or torch: torch's kernels on the CPU")
    parser.add_argument("--rounds", type=int, default=9, help="number")
    parser.add_argument("--edge", type=int, default=560, help="pixels of an edge of the images")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same architecture")
    options = parser.parse_args()
    began = time.perf_counter()
    with open_model(options.models, options.device, tiny=options.tiny) as llm:
        print(json.dumps({"row": "start", "seconds": round(time.perf_counter() - began, 1)}), flush=True)
        print_figures(llm, options.rounds, options.edge, tiny=options.tiny)
    return 0


def print_figures(llm: LLM, rounds: int, edge: int, *, tiny: bool) -> None:
    print(json.dumps(first_tokens(llm, rounds, edge)), flush=True)
    count, new = (4, 8) if tiny else (64, 128)
    for number in range(2):
        print(json.dumps(crowd(llm, count, new, edge, 1000 * (number + 1))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
