"""Files of 1.5 to 3.5 bits in the native kernels: the engine's results, and the memory of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.native import NativeKernels
from bifolio.model.gguf.loader import load_gguf
from bifolio.quant import QuantFormat
from exotic_weights import exotic_tensor, k_quant_llama
from helpers import make_kernels, make_runner, open_entry, random_prompt, run_chunks

COMPACT = ("Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")

# Pack a matrix of a mapped file and print how much memory the process takes for it, in bytes.
MEASURE = """
import mmap, sys
import numpy as np
from bifolio.kernels.interface import Linear
from bifolio.kernels.native import NativeKernels
from bifolio.quant import QuantFormat, QuantizedTensor

def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

path, name, rows, columns = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kernels = NativeKernels(2)
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
data = np.frombuffer(mapped, np.uint8).reshape(rows, -1)
# Once before: the grid, imports.
small = QuantizedTensor(QuantFormat[name], data[:16], (16, columns))
kernels.linear(np.ones((4, columns), np.float32), kernels.prepare_linear(Linear((small,), (None,))))
before = resident()
linear = kernels.prepare_linear(Linear((QuantizedTensor(QuantFormat[name], data, (rows, columns)),), (None,)))
kernels.linear(np.ones((4, columns), np.float32), linear)
print(resident() - before)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", COMPACT)
def test_a_file_of_few_bits_gives_the_logits_of_its_decoded_weights(name: str, tmp_path: Path) -> None:
    path = k_quant_llama(tmp_path / "few.gguf", few_bits=name)
    prompt = random_prompt(9, seed=3, vocab_size=300)
    model = load_gguf(path)
    assert model.weights.layers[0].up.parts[0].format is QuantFormat[name]

    def logits(chunk: int, kernels: KernelSet) -> np.ndarray:
        runner, blocks = make_runner(model, kernels=kernels)
        return run_chunks(runner, open_entry(runner, blocks), prompt, chunk)

    expected = logits(8, make_kernels("reference"))
    found = logits(8, NativeKernels(1))
    assert np.linalg.norm(found - expected) <= 0.05 * np.linalg.norm(expected)
    for chunk in (1, 3):  # one row is multiplied in another way than several
        assert np.array_equal(logits(chunk, NativeKernels(2)), found)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", COMPACT)
def test_a_process_takes_the_size_of_the_file_for_its_weights(name: str, tmp_path: Path) -> None:
    rows, columns = 65536, 2048
    data = exotic_tensor(name, 1024, columns).data
    path = tmp_path / "weights"
    with path.open("wb") as file:
        for _ in range(rows // 1024):
            file.write(data.tobytes())
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), name, str(rows), str(columns)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(found.stdout) <= 1.15 * path.stat().st_size + (
        16 << 20
    )  # a slab of the file is mapped while it is packed


@pytest.mark.slow
def test_a_real_file_of_two_bits_writes_sense(models_dir: Path) -> None:
    path = models_dir / "tinyllama-1.1b.IQ2_XXS.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in BIFOLIO_TEST_MODELS")
    llm = LLM(str(path), threads=2, max_num_seqs=1, max_model_len=256)
    params = SamplingParams(max_tokens=12, temperature=0)
    text = llm.generate(["The capital of France is"], params, use_tqdm=False)[0].outputs[0].text
    assert "city" in text or "Paris" in text
