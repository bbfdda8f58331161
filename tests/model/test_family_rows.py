"""Every family of `family_rows`: equal to transformers from a folder and from a GGUF file, and to llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import ROWS, UNREAD, row_folder, row_model, save_row
from renamed_folders import as_known
from whole_prompt import greedy_tokens, prompt_logits

from bifolio.api.llm import LLM
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.select import select_kernels
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from bifolio.quant import QuantFormat
from bifolio.sampling_params import SamplingParams
from helpers import (
    cpu_kernel_names,
    likeliest_tokens,
    make_kernels,
    make_runner,
    open_entry,
    random_prompt,
    run_chunks,
    transformers_greedy,
    transformers_logits,
)

pytestmark = pytest.mark.full  # transformers is slow to import
LENGTH = 13
TOLERANCE = 1e-4  # absolute, on logits of several units, in f32
NewKernels = Callable[[], KernelSet]


def worst_chunks(model: LoadedModel, theirs: np.ndarray, chunks: range | tuple[int, ...], block_size: int,
                 kernels: KernelSet) -> float:  # fmt: skip
    """The largest difference of logits over a prompt in chunks of these sizes; the last half is decoded."""
    prompt = random_prompt(len(theirs))
    runner, blocks = make_runner(model, kernels=kernels, block_size=block_size, poison=True)
    found = 0.0
    for size in chunks:
        entry = open_entry(runner, blocks)
        prefilled = run_chunks(runner, entry, prompt[:LENGTH], size)
        decoded = run_chunks(runner, entry, prompt[LENGTH:], 1, decode=True)
        found = max(found, float(np.abs(np.concatenate([prefilled, decoded]) - theirs).max()))
        blocks.release(entry.sequence_id)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ROWS)
def test_a_folder_gives_transformers_logits(name: str, new_kernels: NewKernels) -> None:
    model, folder = row_folder(name)
    theirs = transformers_logits(model, random_prompt(LENGTH + 7))
    assert theirs.std() > 0.5  # a network whose logits are all alike proves nothing
    loaded = load_folder(folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert loaded.config.num_parameters == sum(parameter.numel() for parameter in trained) - UNREAD.get(name, 0)
    assert worst_chunks(loaded, theirs, (1, 4, LENGTH), 4, new_kernels()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), product(ROWS, cpu_kernel_names()))
def test_every_chunk_and_block_size(name: str, kernels: str) -> None:
    model, folder = row_folder(name)
    theirs = transformers_logits(model, random_prompt(LENGTH + 7))
    loaded = load_folder(folder)
    for block_size in (1, 4, 16):
        assert worst_chunks(loaded, theirs, range(1, LENGTH + 1), block_size, make_kernels(kernels)) < TOLERANCE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ROWS)
def test_64_greedy_tokens_are_those_of_transformers(name: str) -> None:
    check_greedy_tokens(name, select_kernels("cpu", threads=1))


def check_greedy_tokens(name: str, kernels: KernelSet) -> None:
    """Each token of an engine has the largest logit that transformers computes behind the tokens before it."""
    model, folder = row_folder(name)
    prompts = [random_prompt(length, seed=length) for length in (LENGTH, 17)]
    for prompt, tokens in zip(prompts, engine_tokens(folder, prompts, kernels), strict=True):
        assert len(tokens) == 64
        assert tokens == likeliest_tokens(model, prompt, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_64_greedy_tokens_are_generated_by_transformers(name: str) -> None:
    model, folder = row_folder(name)
    prompt = random_prompt(LENGTH)
    found = engine_tokens(folder, [prompt], select_kernels("cpu", threads=1))
    assert found == [transformers_greedy(model, prompt, 64)]


def engine_tokens(folder: Path, prompts: list[list[int]], kernels: KernelSet) -> list[list[int]]:
    """64 greedy tokens behind each prompt, in steps of both phases."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    llm = LLM(folder, kernels=kernels, block_size=4, chunk_size=5, max_num_seqs=2, poison_free_blocks=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_gguf_file_and_a_folder_written_from_it_keep_the_logits(name: str, tmp_path: Path) -> None:
    model, folder = row_folder(name)
    prompt = random_prompt(LENGTH)
    theirs = transformers_logits(model, prompt)
    source = load_folder(folder)
    write_gguf(tmp_path / "model.gguf", source, QuantFormat.F32)
    loaded = load_gguf(tmp_path / "model.gguf")
    assert loaded.config.num_parameters == source.config.num_parameters
    np.testing.assert_allclose(prompt_logits(loaded.weights, prompt), theirs, atol=TOLERANCE)
    write_folder(tmp_path / "back", loaded, QuantFormat.F32)
    np.testing.assert_allclose(reloaded_logits(tmp_path / "back", prompt), theirs, atol=TOLERANCE)


def reloaded_logits(folder: Path, prompt: list[int]) -> np.ndarray:
    """By transformers, which reads a folder that we wrote."""
    import transformers

    as_known(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return transformers_logits(model, prompt)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.peer is not None])
def test_llama_cpp_gives_the_same_greedy_tokens(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra: peers)")
    save_row(name, row_model(name, **(ROWS[name].peer or {})), tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf", load_folder(tmp_path / "folder"), QuantFormat.F32)
    loaded = load_gguf(tmp_path / "model.gguf")
    prompt = random_prompt(LENGTH)
    peer = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=128, n_threads=1, verbose=False, logits_all=True)
    peer.eval(prompt)
    np.testing.assert_allclose(prompt_logits(loaded.weights, prompt), peer.scores[:LENGTH], atol=0.08)  # f16 cache
    theirs = [token for token, _ in zip(peer.generate(prompt, temp=0.0, top_k=1), range(8), strict=False)]
    assert greedy_tokens(loaded.weights, prompt, 8) == theirs
