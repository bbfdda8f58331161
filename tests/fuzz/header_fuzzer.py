"""Seeded mutations of GGUF, safetensors and llama2.c headers: each opens, or is refused with a named error.

python -m tests.fuzz.header_fuzzer --cases 20000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import BifolioError
from bifolio.model.families import family_of
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.llama2c import load_llama2c
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble
from bifolio.quant import QuantFormat, QuantizedTensor
from bifolio.text.tokenizer import Tokenizer

ALLOWANCE = 64 << 20  # bytes beyond the size of the file
SECONDS = 20  # a case that takes longer hangs
INTERESTING = [0, 1, 2, 3, 7, 31, 32, 33, 127, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
               2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A whole file and the way it is opened."""

    name: str
    content: bytes
    header_bytes: int  # mutations stay inside of these
    suffix: str
    open: Callable[[Path], None]


@dataclass
class Report:
    """What happened to the cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    largest_allocation: int = 0
    slowest_seconds: float = 0.0
    resident_growth: int = 0  # bytes, of the whole run; includes what libraries outside of Python allocate


def samples(folder: Path) -> list[Sample]:
    """Small files of every kind, with vocabularies, several formats and ropes."""
    made = []
    for name, format in (("llama", QuantFormat.F32), ("qwen3", QuantFormat.Q8_0), ("gpt2", QuantFormat.F16),
                         ("gemma3", QuantFormat.Q4_0), ("phi3", QuantFormat.Q4_1)):  # fmt: skip
        path = folder / f"{name}.gguf"
        write_gguf(path, _random_model(name), format)
        made.append(Sample(f"gguf/{name}", path.read_bytes(), open_gguf(path).data_start, ".gguf", _open_gguf))
    tensors = {f"t{i}.weight": np.ones((3 + i, 8), np.float32) for i in range(6)}
    half = {"half": QuantizedTensor.quantize(np.ones((2, 4), np.float32), QuantFormat.BF16)}
    write_safetensors(folder / "x.safetensors", {**tensors, **half}, {"format": "pt"})
    content = (folder / "x.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    made.append(Sample("safetensors", content, header_bytes, ".safetensors", _open_safetensors))
    made.append(Sample("llama2.c", _llama2c_bytes(), 28, ".bin", _open_llama2c))
    return made


def mutate(sample: Sample, generator: random.Random) -> bytes:
    """One to four changes of the header."""
    content = bytearray(sample.content)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        place = generator.randrange(min(sample.header_bytes, len(content)) or 1)
        match generator.randrange(8):
            case 0:
                content[place] ^= 1 << generator.randrange(8)
            case 1:
                content[place] = generator.randrange(256)
            case 2:
                content[place : place + 8] = struct.pack("<Q", generator.choice(INTERESTING))
            case 3:
                content[place : place + 4] = struct.pack("<I", generator.choice(INTERESTING) & 0xFFFFFFFF)
            case 4:
                content[place : place + 8] = struct.pack("<Q", generator.getrandbits(64))
            case 5:
                del content[place : place + generator.randrange(1, 40)]
            case 6:
                start = generator.randrange(len(content))
                content[place:place] = content[start : start + generator.randrange(1, 64)]
            case 7:
                del content[generator.randrange(len(content)) :]
        if not content:
            break
    return bytes(content) if generator.random() < 0.8 else _mutate_text(bytes(content), generator)


def _mutate_text(content: bytes, generator: random.Random) -> bytes:
    """Exchange a number that is written out in digits, as safetensors headers have them."""
    digits = [i for i, byte in enumerate(content[:4096]) if 48 <= byte <= 57]
    if not digits:
        return content
    place = generator.choice(digits)
    new = generator.choice(["-1", "0", "1e9", "99999999999999999999", "1.5", "null", '"x"', "[]", "[[[[]]]]", "{}"])
    return content[:place] + new.encode() + content[place + 1 :]


def run_cases(count: int, seed: int) -> Report:
    """Open `count` mutated files, a different kind each time, and note everything that is not a named error."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = samples(folder)
        for sample in kinds:  # the undamaged files must open; this also imports what opening needs
            sample.open(_write(folder, sample, sample.content))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        for case in range(count):
            generator = random.Random(f"{seed}/{case}")
            sample = generator.choice(kinds)
            _run_case(f"{sample.name} case {case}", sample, mutate(sample, generator), folder, report)
        tracemalloc.stop()
        report.resident_growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return report


def _run_case(label: str, sample: Sample, content: bytes, folder: Path, report: Report) -> None:
    path = _write(folder, sample, content)
    tracemalloc.reset_peak()
    start, base = time.perf_counter(), tracemalloc.get_traced_memory()[0]
    try:
        with _time_limit():
            sample.open(path)
        report.outcomes["opened"] += 1
    except BifolioError as error:
        report.outcomes[type(error).__name__] += 1
        if not str(error):
            report.failures.append(f"{label}: an error without a message")
    except BaseException as error:
        report.failures.append(f"{label}: {type(error).__name__}: {error}")
        if isinstance(error, KeyboardInterrupt):
            raise
    allocated = tracemalloc.get_traced_memory()[1] - base
    if allocated > len(content) + ALLOWANCE:
        report.failures.append(f"{label}: allocated {allocated} bytes for a file of {len(content)}")
    report.largest_allocation = max(report.largest_allocation, allocated)
    report.slowest_seconds = max(report.slowest_seconds, time.perf_counter() - start)


def _write(folder: Path, sample: Sample, content: bytes) -> Path:
    path = folder / f"case{sample.suffix}"
    path.unlink(missing_ok=True)  # a new file each time: the map of the last one may still be alive
    path.write_bytes(content)
    return path


@contextmanager
def _time_limit() -> Iterator[None]:
    def expire(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the case took more than {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _open_gguf(path: Path) -> None:
    model = load_gguf(path)
    _touch(model)


def _open_llama2c(path: Path) -> None:
    _touch(load_llama2c(path))


def _open_safetensors(path: Path) -> None:
    tensors = open_safetensors(path).tensors
    for name in tensors:
        tensors[name].dequantize_rows(slice(0, 1))


def _touch(model: LoadedModel) -> None:
    """The first and the last byte of the matrices, and the tokenizer."""
    for layer in model.weights.layers:
        for part in (*layer.qkv.parts, *layer.up.parts, *layer.down.parts):
            part.dequantize_rows(np.array([0, part.num_rows - 1]))
    if model.tokenizer is not None:
        model.tokenizer.decode(model.tokenizer.encode("Hello, world! 123"))


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
        layer_rope=(1, 0) if gemma else (), layer_window=(8, None) if gemma else (), bos_token_id=256,
        eos_token_ids=(257,),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    report = run_cases(arguments.cases, arguments.seed)
    for failure in report.failures[:20]:
        print(failure)
    summary = {
        "cases": arguments.cases,
        "outcomes": dict(report.outcomes),
        "failures": len(report.failures),
        "largest_allocation_bytes": report.largest_allocation,
        "resident_growth_bytes": report.resident_growth,
        "slowest_case_seconds": round(report.slowest_seconds, 3),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(summary, indent=2))
    raise SystemExit(bool(report.failures))


if __name__ == "__main__":
    main()
