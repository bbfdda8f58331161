"""Models written with a trained head for multi-token prediction: the model is the same, and its drafts are accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.cli.main import build_app
from bifolio.config import CacheConfig, RopeConfig, layers_of
from bifolio.engine.speculative.head_runner import HeadRun, HeadRunner
from bifolio.errors import BifolioError, ConfigError
from bifolio.kernels.interface import AttentionPhase
from bifolio.model.draft_head import prepare_head
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.safetensors_file import open_safetensors
from bifolio.model.loader import load_model, open_model
from bifolio.model.next_token_head import load_next_token_head
from bifolio.quant.formats import QuantFormat
from cli_runner import CliRunner
from draft_heads import SHORT_RUN, accepted, sure_target
from helpers import (
    TINY,
    cpu_kernel_names,
    fresh_folder,
    make_kernels,
    make_runner,
    random_prompt,
    tiny_folder,
    tiny_loaded,
    tiny_tensors,
    transformers_greedy,
)

torch = pytest.importorskip("torch")
from bifolio.train.head_data import rows_of  # noqa: E402
from bifolio.train.head_run import HeadResult  # noqa: E402
from bifolio.train.mtp import MtpSettings, body_format, train_mtp  # noqa: E402
from bifolio.train.mtp_head import MtpHead, pair_config  # noqa: E402
from bifolio.train.progress import SilentProgress  # noqa: E402

VOCAB = 61
PROMPTS = [random_prompt(1 + 3 * i, i, VOCAB) for i in range(6)]


@cache
def trained() -> HeadResult:
    settings = MtpSettings(str(sure_target()), str(fresh_folder("pair")), **SHORT_RUN)
    return train_mtp(settings, SilentProgress())


def short_run(path: Path, **changes: Any) -> Path:
    settings = {"steps": 1, "batch_size": 2, "context": 8, "sequences": 4, "threads": 1, **changes}
    return train_mtp(MtpSettings(str(path), str(fresh_folder("pair")), **settings), SilentProgress()).folder


def outputs(
    path: Path, speculative: SpeculativeConfig | None = None, kernels: str = "reference"
) -> tuple[LLM, list[Any]]:
    """Greedy and sampled texts of several requests at once."""
    own: Any = make_kernels(kernels)
    llm = LLM(path, kernels=own, num_blocks=80, block_size=4, max_model_len=64, max_num_seqs=6, chunk_size=7,
              token_budget=40, speculative=speculative)  # fmt: skip
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=20, n=1 + i % 2, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return llm, [[o.token_ids for o in output.outputs] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@cache
def plain(kernels: str) -> list[Any]:
    return outputs(sure_target(), kernels=kernels)[1]


@pytest.mark.full
def test_the_loss_falls_and_drafts_are_accepted() -> None:
    result = trained()
    assert np.mean(result.losses[-5:]) < 0.7 * np.mean(result.losses[:5])
    assert min(result.agreement) > 0.4  # chance is 1 of 61
    config = SpeculativeConfig("mtp", adaptive=False, length=2)
    assert accepted(result.folder, config) > 0.5
    assert accepted(short_run(sure_target(), learning_rate=1e-9), config) < 0.2


@pytest.mark.full
@pytest.mark.parametrize("kernels", [name for name in cpu_kernel_names() if name != "torch"])
def test_the_pair_writes_the_text_of_its_target(kernels: str) -> None:
    folder = trained().folder
    assert outputs(folder, kernels=kernels)[1] == plain(kernels)
    for length in (1, 3):
        llm, found = outputs(folder, SpeculativeConfig("mtp", adaptive=False, length=length), kernels)
        assert found == plain(kernels)
        assert llm.engine.speculator is not None
        assert llm.engine.speculator.stats.num_accepted_tokens > 5  # the prompts are random
    assert outputs(folder, SpeculativeConfig("mtp"), kernels)[1] == plain(kernels)


@pytest.mark.full
def test_transformers_reads_the_pair() -> None:
    import transformers

    folder = trained().folder
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path).float().eval() for path in (sure_target(), folder)
    )
    assert type(theirs).__name__ == "Glm4MoeForCausalLM"
    for prompt in PROMPTS:
        assert transformers_greedy(theirs, prompt, 12) == transformers_greedy(ours, prompt, 12)


@pytest.mark.full
def test_the_chains_of_the_training_are_the_drafts_of_the_written_head() -> None:
    """Entry k of the chain behind j equals passes of the engine over the states up to j and k own hidden states."""
    folder, kernels, model = trained().folder, make_kernels("reference"), load_model(trained().folder)
    loaded = load_next_token_head(open_model(folder), model)
    weights = prepare_head(loaded.weights, kernels, make_runner(model, kernels=kernels)[0].weights)
    stored = open_safetensors(folder / "model.safetensors").tensors
    head = MtpHead(pair_config(load_model(sure_target()).weights), rows_of(stored["lm_head.weight"]))
    with torch.no_grad():
        for name, value in zip(head.names, head.values, strict=True):
            value.copy_(trained_value(stored, name))
    states = np.random.default_rng(1).standard_normal((7, 32)).astype(np.float32)
    tokens = random_prompt(8, 4, VOCAB)
    normed = torch.nn.functional.rms_norm(
        torch.from_numpy(states), (32,), rows_of(stored["model.norm.weight"]), TINY["rms_norm_eps"]
    )
    embeddings = rows_of(stored["model.embed_tokens.weight"])[tokens[1:]]
    with torch.no_grad():
        found = head(normed[None], embeddings[None], 3)
    for j in range(5):
        runner, table = HeadRunner(weights, CacheConfig(20, 4), kernels), np.arange(3, 15, dtype=np.int32)
        run = HeadRun(table, 0, 0, tokens[1 : j + 2])
        given = kernels.from_host(states[: j + 1])
        logits, hidden = runner.run([run], given, AttentionPhase.PREFILL, own_states=False)
        for k in range(3):
            np.testing.assert_allclose(found[k][0, j].numpy(), kernels.to_host(logits)[-1], atol=1e-4)
            if j + k + 2 < len(tokens):
                run = HeadRun(table, 0, j + k + 1, tokens[j + k + 2 : j + k + 3])
                last = kernels.take(hidden, kernels.from_host(np.array([len(kernels.to_host(hidden)) - 1])))
                logits, hidden = runner.run([run], last, AttentionPhase.DECODE, own_states=True)
            else:
                break


def trained_value(stored: Any, name: str) -> Any:
    """A tensor of the head with its MLP in one piece."""
    prefix = "model.layers.2."
    if not name.startswith("mlp."):
        return rows_of(stored[f"{prefix}{name}.weight"])
    short = name.removeprefix("mlp.")
    halves = [stored[f"{prefix}mlp.{part}.{short}.weight"] for part in ("shared_experts", "experts.1")]
    return torch.cat([rows_of(half) for half in halves], dim=1 if short == "down_proj" else 0)


@pytest.mark.full
@pytest.mark.parametrize("format", [QuantFormat.F32, QuantFormat.Q8_0])
def test_gguf_files_as_targets(format: QuantFormat, tmp_path: Path) -> None:
    """Files with another order of query rows, tied embeddings and quantised matrices."""
    whole = load_model(tiny_folder(seed=5, tie_word_embeddings=True, tokenizer=True))
    write_gguf(tmp_path / "tiny.gguf", whole, format)
    source = load_model(tmp_path / "tiny.gguf")
    folder = short_run(tmp_path / "tiny.gguf")
    pair = load_model(folder)
    assert pair.config.tie_embeddings
    assert body_format(source) == (QuantFormat.F16 if format.is_quantized else QuantFormat.F32)
    assert pair.require_tokenizer().encode("a fox") == source.require_tokenizer().encode("a fox")
    assert pair.generation_config["eos_token_id"] == [0]
    prompts = [[0, *random_prompt(5 + i, i)] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for model in (source, pair):
        own: Any = make_kernels("reference")
        llm = LLM(model, kernels=own, num_blocks=40, max_model_len=64)
        results = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(result.outputs[0].token_ids) for result in results])
    assert found[0] == found[1]


# -- without training -------------------------------------------------------------------------------------------------
def test_a_head_begins_as_the_last_layer(tmp_path: Path) -> None:
    """Also of a file with another order of query rows."""
    model = tiny_loaded()
    write_gguf(tmp_path / "tiny.gguf", model, QuantFormat.F32)
    tensors = tiny_tensors(TINY)
    for each in (model, load_model(tmp_path / "tiny.gguf")):
        head = MtpHead(pair_config(each.weights), rows_of(each.weights.head.parts[0]))
        head.start_from(each)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "input_layernorm"):
            wanted = tensors[f"model.layers.1.{name}.weight"]
            np.testing.assert_array_equal(head.value(name).detach().numpy(), wanted)


def test_the_tensors_of_a_head() -> None:
    """The shared expert has the first half of the MLP, both routed experts the second; the router prefers none."""
    head = MtpHead(pair_config(tiny_loaded().weights), rows_of(tiny_loaded().weights.head.parts[0]))
    tensors, mlp = head.tensors(), "model.layers.2.mlp."
    gate, down = (head.value(f"mlp.{name}_proj").detach().numpy() for name in ("gate", "down"))
    np.testing.assert_array_equal(tensors[mlp + "shared_experts.gate_proj.weight"], gate[:24])
    np.testing.assert_array_equal(tensors[mlp + "shared_experts.down_proj.weight"], down[:, :24])
    for expert in (0, 1):
        np.testing.assert_array_equal(tensors[f"{mlp}experts.{expert}.gate_proj.weight"], gate[24:])
        np.testing.assert_array_equal(tensors[f"{mlp}experts.{expert}.down_proj.weight"], down[:, 24:])
    assert not tensors[mlp + "gate.weight"].any()
    assert tensors["model.layers.2.eh_proj.weight"].shape == (32, 64)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"qkv_bias": True}, "qkv_bias"),
        ({"qk_norm": True}, "qk_norm"),
        ({"norm": "layer"}, "norm"),
        ({"activation": "gelu"}, "activation"),
        ({"logit_softcap": 30.0}, "logit_softcap"),
        ({"attention_softcap": 30.0}, "attention_softcap"),
        ({"attention_scale": 0.3}, "attention_scale"),
        ({"layers": layers_of(2, window=(8, None))}, "layers.window"),
        ({"layers": layers_of(2, rope=(0, None))}, "layers"),
        ({"residual_scale": 0.5}, "residual_scale"),
        ({"embedding_scale": 2.0}, "embedding_scale"),
        ({"post_norms": True}, "post_norms"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"ropes": (RopeConfig(1e4, 8),) * 2}, "ropes"),
        ({"learned_positions": True, "ropes": ()}, "learned_positions"),
    ],
)
def test_other_networks_are_refused(changes: dict[str, Any], word: str) -> None:
    weights = tiny_loaded().weights
    pair_config(weights)
    with pytest.raises(ConfigError, match=rf"{word}.* cannot be written .* stories"):
        pair_config(replace(weights, config=replace(weights.config, **changes)))


def test_folders_that_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--force"):
        train_mtp(MtpSettings(str(sure_target()), str(sure_target())), SilentProgress())
    with pytest.raises(ConfigError, match="the model itself"):
        train_mtp(MtpSettings(str(sure_target()), str(sure_target()), force=True), SilentProgress())
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not a model folder"):
        train_mtp(MtpSettings(str(sure_target()), str(tmp_path), force=True), SilentProgress())
    assert (tmp_path / "letters.txt").read_text() == "dear"


# -- the command line -------------------------------------------------------------------------------------------------
def bifolio(*arguments: object) -> str:
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.full
def test_the_command_line(tmp_path: Path) -> None:
    folder, pair = tiny_folder(tokenizer=True), tmp_path / "pair"
    sizes = ("--steps", "2", "--batch-size", "2", "--context", "16")
    record = json.loads(bifolio("train", "--mtp", folder, "--output", pair, *sizes, "--json"))
    assert record["folder"] == str(pair)
    assert len(record["losses"]) == record["steps"] == 2
    assert len(record["agreement"]) == 3
    options = ("A little fox", "-t", "0", "-n", "12", "--threads", "1")
    text = bifolio("generate", *options, "--model", folder)
    assert bifolio("generate", *options, "--model", pair, "--speculative", "mtp") == text
    with pytest.raises(BifolioError, match="--vocab-size is not for --mtp"):
        bifolio("train", "--mtp", folder, "--vocab-size", "300")
    both = ["train", "--mtp", str(folder), "--eagle", str(folder)]
    assert CliRunner().invoke(build_app(), both).exit_code == 2
