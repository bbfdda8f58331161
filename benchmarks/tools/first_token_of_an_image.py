"""Time to the first token of a prompt with an image: bifolio, and llama.cpp's mtmd beside it, in turns.

    python -m benchmarks.tools.first_token_of_an_image [--threads 2] [--rounds 9] [--edge 2048] \
        [--peer-python PYTHON of an environment with xllamacpp]

Both programs read the same two GGUF files with random weights in the shape of SmolVLM-256M: a text model in `--format`
and its tower in F16. Each round shows both a new image of `--size` pixels, in another order from round to round. The
time is that of a whole request for one token, image decoding included: of bifolio in this process, of llama.cpp's
server over HTTP on this machine. As in the released processor, images are resized to `--edge 2048` and cut into 17
tiles of 64 rows each; with 512 bifolio reads one tile, as transformers does, and llama.cpp two. Compare times where the
tokens of the prompts, which are printed, are about equal.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_files import write_model, write_tokenizer
from benchmarks.shapes import decoder
from bifolio import LLM, SamplingParams
from bifolio.config import RopeConfig
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat

TEXT = decoder("llama", 49280, 576, 30, 9, 3, 64, 1536, RopeConfig(100000.0, 64), tie_embeddings=True)
WIDTH, LAYERS, HEADS, FFN, EDGE, PATCH, SCALE = 768, 12, 12, 3072, 512, 16, 4  # of the tower
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>",
           *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))  # fmt: skip
LINE_END = "\u010a"  # as bytes are written in a vocabulary
QUESTION = "What is in this picture? Describe it in one sentence."
PEER = """
import importlib, json, sys
llama, wanted = importlib.import_module("xllamacpp"), json.loads(sys.argv[1])
params = llama.CommonParams()
params.model.path, params.mmproj.path = wanted["text"], wanted["tower"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted["threads"]
params.n_ctx, params.n_parallel, params.warmup = 4096, 1, True
server = llama.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def write_text(path: Path, format: str) -> None:
    """The text model, with the tokens around images."""
    from tokenizers import AddedToken, Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "text", TEXT, "f16")
        write_tokenizer(Path(folder) / "text", TEXT.vocab_size - len(SPECIAL))
        place = str(Path(folder) / "text" / "tokenizer.json")
        tokenizer = Tokenizer.from_str(json.dumps(with_empty_line(json.loads(Path(place).read_text()))))
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        tokenizer.save(place)
        write_gguf(path, load_model(Path(folder) / "text"), QuantFormat.parse(format), overwrite=True)


def with_empty_line(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary with a token of two line ends, which llama.cpp puts around images, in place of its last word."""
    vocab = tokenizer["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    number = vocab.pop(last)
    vocab[2 * LINE_END], tokenizer["model"]["merges"] = number, [[LINE_END, LINE_END]]
    return tokenizer


def write_tower(path: Path, longest_edge: int) -> None:
    """SigLIP with pixel shuffle, in llama.cpp's names."""
    import gguf

    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "clip")
    numbers = {
        "projection_dim": TEXT.hidden_size, "image_size": EDGE, "patch_size": PATCH, "embedding_length": WIDTH,
        "feed_forward_length": FFN, "block_count": LAYERS, "attention.head_count": HEADS,
        "projector.scale_factor": SCALE,
    }  # fmt: skip
    if longest_edge > EDGE:  # without this entry an image is one tile
        numbers["preproc_image_size"] = longest_edge
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)

    def matrix(name: str, *shape: int, type: Any = np.float16) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float32(np.prod(shape[1:])))
        writer.add_tensor(f"{name}.weight", values.astype(type))

    def bias(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.bias", np.zeros(size, np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        bias(name, WIDTH)

    matrix("v.patch_embd", WIDTH, 3, PATCH, PATCH, type=np.float32)
    bias("v.patch_embd", WIDTH)
    matrix("v.position_embd", (EDGE // PATCH) ** 2, WIDTH, type=np.float32)
    for layer in range(LAYERS):
        norm(f"v.blk.{layer}.ln1")
        norm(f"v.blk.{layer}.ln2")
        for part, rows, columns in (
            *((f"attn_{name}", WIDTH, WIDTH) for name in ("q", "k", "v", "out")),
            ("ffn_up", FFN, WIDTH),
            ("ffn_down", WIDTH, FFN),
        ):
            matrix(f"v.blk.{layer}.{part}", rows, columns)
            bias(f"v.blk.{layer}.{part}", rows)
    norm("v.post_ln")
    matrix("mm.model.fc", TEXT.hidden_size, WIDTH * SCALE**2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def picture(size: int, seed: int) -> bytes:
    """A PNG of waves of colour."""
    import PIL.Image

    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:size, 0:size] / size
    waves = [np.sin(2 * np.pi * (a * rows + b * columns + c)) for a, b, c in rng.uniform(0.5, 4, (3, 3))]
    found = io.BytesIO()
    PIL.Image.fromarray((127.5 + 127.5 * np.stack(waves, axis=-1)).astype(np.uint8)).save(found, "PNG")
    return found.getvalue()


@dataclass
class Peer:
    """llama.cpp's server in a process of its own."""

    process: subprocess.Popen[str]
    address: str
    marker: str  # of an image in a prompt

    @classmethod
    def start(cls, python: str, text: Path, tower: Path, threads: int) -> Peer:
        wanted = json.dumps({"text": str(text), "tower": str(tower), "threads": threads})
        process = subprocess.Popen([python, "-c", PEER, wanted], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError("llama.cpp's server did not start: run it by hand to see its messages")
        with urllib.request.urlopen(f"{address}/props", timeout=60) as reply:
            return cls(process, address, json.load(reply).get("media_marker", "<__media__>"))

    def ask(self, image: bytes) -> int:
        """Tokens of the prompt."""
        prompt = {"prompt_string": self.marker + QUESTION, "multimodal_data": [base64.b64encode(image).decode()]}
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(f"{self.address}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request, timeout=600) as reply:
            return int(json.load(reply)["tokens_evaluated"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def measure(asks: dict[str, Callable[[bytes], int]], rounds: int, size: int) -> dict[str, list[float]]:
    """Seconds of each round, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in asks}
    for number in range(rounds + 1):
        image, names = picture(size, number), list(asks)
        for name in names if number % 2 else names[::-1]:
            began = time.perf_counter()
            tokens = asks[name](image)
            seconds = time.perf_counter() - began
            if number:
                times[name].append(seconds)
            else:
                print(f"{name}: {tokens} tokens of the prompt", file=sys.stderr)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="number")
    parser.add_argument("--size", type=int, default=512, help="pixels of an edge of the images")
    parser.add_argument("--edge", type=int, default=2048, help="longest edge in pixels that images are resized to")
    parser.add_argument("--format", default="q8_0", help="format of the text model")
    parser.add_argument("--peer-python", help="Python of an environment with xllamacpp; without: bifolio alone")
    parser.add_argument("--folder", type=Path, help="where the files are kept; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text, tower = folder / f"text-{arguments.format}.gguf", folder / f"mmproj-{arguments.edge}.gguf"
        if not text.exists():
            write_text(text, arguments.format)
        if not tower.exists():
            write_tower(tower, arguments.edge)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        with LLM(text, mmproj=tower, threads=arguments.threads, max_model_len=4096) as llm:

            def ask(image: bytes) -> int:
                import PIL.Image

                data = {"image": PIL.Image.open(io.BytesIO(image))}
                (output,) = llm.generate([{"prompt": f"<image>{QUESTION}", "multi_modal_data": data}], params)
                return len(output.prompt_token_ids)

            asks: dict[str, Callable[[bytes], int]] = {"bifolio": ask}
            peer = None
            if arguments.peer_python:
                peer = Peer.start(arguments.peer_python, text, tower, arguments.threads)
                asks["llama.cpp"] = peer.ask
            try:
                times = measure(asks, arguments.rounds, arguments.size)
            finally:
                if peer is not None:
                    peer.stop()
    medians = {name: statistics.median(own) for name, own in times.items()}
    record: dict[str, Any] = {name: {"median_s": medians[name], "s": times[name]} for name in times}
    if "llama.cpp" in medians:
        record["ratio"] = medians["llama.cpp"] / medians["bifolio"]
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
