"""`bifolio serve --device cuda` with capabilities together: adapters, an FP8 cache, tiers, drafts, images and vectors.

Without a GPU (`--device torch`) the same servers run on torch's kernels.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "encoders"))

from encoder_models import TEXTS, encoder_model
from served import Client, served

from adapter_files import adapter_folder
from bifolio import LLM, SamplingParams
from helpers import random_prompt, tiny_folder

pytestmark = pytest.mark.skipif(
    any(
        importlib.util.find_spec(module) is None for module in ("starlette", "uvicorn", "msgspec", "prometheus_client")
    ),
    reason="bifolio serve needs starlette, uvicorn, msgspec and prometheus_client",
)
Start = Callable[..., Any]
MODEL: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "max_position_embeddings": 2048}  # fmt: skip
FEW = ("--max-num-seqs", "16")
ON_A_GPU = ("--kv-cache-dtype", "fp8", "--deterministic")


@pytest.fixture
def start(device: str, release_gpu: None) -> Start:
    @contextmanager
    def run(folder: Path, *arguments: str, on_a_gpu: tuple[str, ...] = ()) -> Iterator[Client]:
        own = (*on_a_gpu, "--device", device) if device != "cpu" else ()
        with served(folder, *FEW, *own, *arguments, kernels="torch" if device == "cpu" else None) as client:
            yield client

    return run


def complete(client: Client, model: str, prompt: list[int], **options: Any) -> tuple[list[Any], int]:
    """Tokens and logprobs of every answer, and the cached tokens of the prompt."""
    answer = client.complete(prompt, 12, model=model, ignore_eos=True, logprobs=1, **options)
    found = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    return found, (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def assert_equal(found: list[Any], expected: list[Any], exactly: bool) -> None:
    """Tokens and logprobs; torch's products of other batches round in other ways."""
    if exactly:
        assert found == expected
        return
    for (tokens, scores), (others, wanted) in zip(chain(*found), chain(*expected), strict=True):
        assert tokens == others
        assert scores == pytest.approx(wanted, abs=1e-3)


def test_adapters_drafts_and_tiers_with_an_fp8_cache(start: Start, device: str, tmp_path: Path) -> None:
    """A crowd gets its solo bits, and a server after it finds their blocks in the files of the first."""
    base, exactly = tiny_folder(**MODEL), device != "cpu"
    names = ["door", "one", "two", "three"]
    modules = [f"{name}={adapter_folder(base, rank=4 + 5 * seed, seed=seed)}" for seed, name in enumerate(names[1:])]
    arguments = ("--lora-modules", *modules, "--speculative", "ngram", "--kv-offload-dir", str(tmp_path / "blocks"))
    wanted = [(names[number % 4], random_prompt(30 + 37 * number, seed=number, vocab_size=61)) for number in range(12)]
    options = [{"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number, "n": 1 + number % 3}
               for number in range(12)]  # fmt: skip

    def crowd(client: Client) -> list[tuple[list[Any], int]]:
        with ThreadPoolExecutor(12) as pool:
            calls = [pool.submit(complete, client, name, prompt, cache_salt="x", **chosen)
                     for (name, prompt), chosen in zip(wanted, options, strict=True)]  # fmt: skip
            return [call.result() for call in calls]

    with start(base, *arguments, on_a_gpu=ON_A_GPU) as client:
        alone = [complete(client, name, prompt, **chosen)[0]
                 for (name, prompt), chosen in zip(wanted, options, strict=True)]  # fmt: skip
        assert_equal([found for found, _ in crowd(client)], alone, exactly)
        assert client.num_used_blocks() == 0
    assert len({json.dumps(found) for found in alone}) == len(alone)  # each adapter answers in its own way
    with start(base, *arguments, on_a_gpu=ON_A_GPU) as client:
        again = crowd(client)
    assert_equal([found for found, _ in again], alone, exactly)
    assert all(cached > 0 for (_, cached), (_, prompt) in zip(again, wanted, strict=True) if len(prompt) > 64)


def test_beams_grammars_and_prefix_hits_with_an_fp8_cache(start: Start) -> None:
    """Requests of every kind at once, and a refused one beside them."""
    common = random_prompt(200, seed=5, vocab_size=61)
    with start(tiny_folder(tokenizer=True, **MODEL), on_a_gpu=ON_A_GPU[:2]) as client:
        with ThreadPoolExecutor(8) as pool:
            beams = [pool.submit(client.beams, [*common, number], 3, 8) for number in range(3)]
            greedy = pool.submit(client.ask, [[*common, number] for number in range(3, 6)])
            refused = pool.submit(client.call, "POST", "/v1/completions", {"model": "door", "prompt": [10**9]})
            assert all(len(found.result()) == 3 for found in beams)
            assert all(len(turn.tokens) > 0 for turn in greedy.result())
            assert refused.result()[0] == 400
        assert client.ask([[*common, 7]])[0].num_cached >= 176
        assert client.num_used_blocks() == 0


def test_images(start: Start, device: str) -> None:
    """The server answers as `LLM` does with the same image, also beside others."""
    pytest.importorskip("PIL")
    from vision.vision_models import gemma3_model, picture

    folder, image = gemma3_model().folder, picture(70, 30, 4)
    data = io.BytesIO()
    image.save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "user", "content": parts}]
    body = {"model": "door", "messages": chat, "temperature": 0, "max_tokens": 6, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    with (
        start(folder, "--max-model-len", "256", on_a_gpu=("--deterministic",)) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(lambda _: client.call("POST", "/v1/chat/completions", body), range(4)))
    assert [status for status, _ in answers] == [200] * 4, answers
    own: dict[str, Any] = {"kernels": "torch"} if device == "cpu" else {"device": device, "deterministic": True}
    with LLM(folder, max_model_len=256, max_num_seqs=16, token_budget=512, **own) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        expected = llm.chat(chat, params)[0].outputs[0].token_ids  # type: ignore[arg-type]
    assert [json.loads(text)["choices"][0]["token_ids"] for _, text in answers] == [list(expected)] * 4


def test_vectors(start: Start) -> None:
    """Those of the reference kernels, in a batch and beside other requests."""
    folder = encoder_model("bert")[1]
    with LLM(folder, kernels="reference") as llm:
        expected = np.stack([result.outputs.data for result in llm.embed(list(TEXTS), use_tqdm=False)])
    with start(folder) as client, ThreadPoolExecutor(8) as pool:
        body = {"model": "door", "input": list(TEXTS)}
        answers = list(pool.map(lambda _: client.call("POST", "/v1/embeddings", body), range(16)))
    for status, text in answers:
        assert status == 200, text
        found = np.array([item["embedding"] for item in json.loads(text)["data"]])
        np.testing.assert_allclose(found, expected, atol=0.05)
