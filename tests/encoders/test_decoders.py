"""Decoders that make vectors and scores: Qwen3-Embedding and Qwen3-Reranker, small and random, beside transformers."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import add_modules, pool
from serving import running_server

from bifolio import LLM, PoolingParams
from bifolio.errors import ModelFileError
from helpers import END_OF_TEXT, fresh_folder, tiny_tokenizer

TEXTS = ["Once upon a time", "The fox", "There was a little dog who ran"]
QUERY = "Who ran?"
CHAT = (
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{# roles: 'query' and 'document' #}<answer>"
)
SIZES = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip


@cache
def decoder(kind: str, *, tied: bool) -> tuple[Any, Path]:
    """A Qwen3 of a class of transformers, and its folder; every text ends with a token that marks its end."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied)
    model = getattr(transformers, kind)(config).eval()
    folder = fresh_folder("qwen3")
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer.from_str(tiny_tokenizer().to_str())
    end = [(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"$A {END_OF_TEXT}", special_tokens=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, folder


def changed(folder: Path, place: Path, **files: Any) -> Path:
    """A copy of a folder with other files; texts as they are, objects as JSON."""
    shutil.copytree(folder, place)
    for name, value in files.items():
        path = place / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja").replace(
            "_md", ".md"
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return place


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]


def token_ids(text: str, *, ends: bool = False) -> list[int]:
    tokenizer = tiny_tokenizer()
    return [*tokenizer.encode(text).ids, *([tokenizer.token_to_id(END_OF_TEXT)] if ends else [])]


def last_states(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        states: np.ndarray = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


def last_logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0, -1].double().numpy()
    return logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "saved without its head"])
def test_vectors_of_an_embedding_model(tied: bool, tmp_path: Path) -> None:
    """The state of the last token, which the tokenizer adds; the query has a prompt. In chunks, and from the cache."""
    model, folder = decoder("Qwen3Model", tied=tied)
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
    folder = changed(folder, tmp_path / "m", config_sentence_transformers_json=prompts)
    add_modules(folder, "lasttoken")
    options = {"chunk_size": 4, "token_budget": 16, "max_num_seqs": 4, "block_size": 4}
    with LLM(folder, **options) as llm:
        assert llm.model.config.language_head == tied
        for prompt_name, before in ((None, ""), ("query", "Find: ")):
            expected = [pool(last_states(model, token_ids(before + text, ends=True)), "lasttoken") for text in TEXTS]
            for _ in range(2):
                found = [each.outputs.data for each in llm.embed(TEXTS, prompt_name=prompt_name)]
                assert np.abs(np.stack(found) - np.stack(expected)).max() < 1e-5
        cut = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))[0].outputs.data
        whole = llm.embed(TEXTS[0])[0].outputs.data
        assert np.abs(cut - whole[:8] / np.linalg.norm(whole[:8])).max() < 1e-6


def rendered(query: str, document: str, system: str = "") -> str:
    parts = [("system", system)] if system else []
    parts += [("query", query), ("document", document)]
    return "".join(f"<{role}>{text}\n" for role, text in parts) + "<answer>"


def reranker(place: Path, negative: int | None, **files: Any) -> Path:
    """A folder of sentence-transformers whose score compares the logits of two tokens."""
    scores = {"true_token_id": 70, "false_token_id": negative}
    _, folder = decoder("Qwen3ForCausalLM", tied=True)
    changed(folder, place, chat_template_jinja=CHAT, modules_json=modules("base.Transformer", "cross.LogitScore"))
    (place / "1_cross.LogitScore").mkdir()
    (place / "1_cross.LogitScore" / "config.json").write_text(json.dumps(scores))
    for name, value in files.items():
        (place / f"{name}.json").write_text(json.dumps(value))
    return place


@pytest.mark.parametrize("negative", [90, None], ids=["yes or no", "yes alone"])
def test_a_reranker_compares_the_logits_of_its_answers(negative: int | None, tmp_path: Path) -> None:
    model, _ = decoder("Qwen3ForCausalLM", tied=True)
    own = {"prompts": {"query": "Judge."}, "default_prompt_name": "query"}
    with LLM(reranker(tmp_path / "m", negative, config_sentence_transformers=own)) as llm:
        found = [each.outputs.score for each in llm.score(QUERY, TEXTS)]
        raw = llm.score(QUERY, TEXTS, pooling_params=PoolingParams(use_activation=False))
    logits = np.stack([last_logits(model, token_ids(rendered(QUERY, text, "Judge."))) for text in TEXTS])
    expected = logits[:, 70] - (0 if negative is None else logits[:, negative])
    assert np.abs(np.array([each.outputs.score for each in raw]) - expected).max() < 2e-5
    assert np.abs(np.array(found) - 1 / (1 + np.exp(-expected))).max() < 1e-5


def test_an_activation_of_the_folder(tmp_path: Path) -> None:
    own = {"activation_fn": "torch.nn.modules.linear.Identity"}
    with LLM(reranker(tmp_path / "m", 90, config_sentence_transformers=own)) as llm:
        (plain,) = llm.score(QUERY, TEXTS[0])
        (raw,) = llm.score(QUERY, TEXTS[0], pooling_params=PoolingParams(use_activation=False))
    assert plain.outputs.score == raw.outputs.score


def test_a_long_document_is_cut_and_the_end_of_the_prompt_stays(tmp_path: Path) -> None:
    with LLM(reranker(tmp_path / "m", 90)) as llm:
        (cut,) = llm.score(QUERY, "dog " * 400, truncate_prompt_tokens=60)
    end = token_ids("\n<answer>")
    whole = token_ids(rendered(QUERY, "dog " * 400))
    assert cut.prompt_token_ids == whole[: 60 - len(end)] + end


def test_a_qwen3_reranker_is_known_by_its_readme(tmp_path: Path) -> None:
    """The published folders are those of a model for text; "yes" and "no" are found in the vocabulary."""
    model, folder = decoder("Qwen3ForCausalLM", tied=True)
    folder = changed(folder, tmp_path / "m")
    raw = json.loads((folder / "tokenizer.json").read_text())
    ids = {"no": 300, "yes": 301}
    vocabulary = {token: number for token, number in raw["model"]["vocab"].items() if number not in ids.values()}
    raw["model"]["vocab"] = vocabulary | ids
    kept = [merge for merge in raw["model"]["merges"] if "".join(merge) in vocabulary]
    raw["model"]["merges"] = [merge for merge in kept if all(part in vocabulary for part in merge)]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with LLM(folder) as llm:
        assert llm.model.pooling.head is None
    (folder / "README.md").write_text("---\nlicense: x\n---\n# Qwen3-Reranker-0.6B\n")
    with LLM(folder) as llm:
        template = llm.model.pair_template
        assert template is not None
        prompt = template.filled(QUERY, TEXTS[1])
        assert "<Query>: Who ran?\n<Document>: The fox<|im_end|>" in prompt
        found = llm.score(QUERY, TEXTS[1])[0]
        logits = last_logits(model, found.prompt_token_ids)
        assert found.prompt_token_ids == llm.model.require_tokenizer().encode(prompt, add_special_tokens=False)
        assert abs(found.outputs.score - 1 / (1 + np.exp(logits[300] - logits[301]))) < 1e-5
    del raw["model"]["vocab"]["yes"]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFileError, match="has no tokens 'yes' and 'no'"):
        LLM(folder)


def test_the_server_ranks_by_the_prompt(tmp_path: Path) -> None:
    folder = reranker(tmp_path / "m", 90)
    with LLM(folder) as llm:
        scores = [each.outputs.score for each in llm.score(QUERY, TEXTS)]
    with running_server(
        engine={"model": str(folder), "max_model_len": 256, "num_blocks": 64, "kernels": "native"}
    ) as server:
        answer = server.http().post("/v1/rerank", json={"query": QUERY, "documents": TEXTS}).json()
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == [scores[index] for index in order]


def decoder_file(path: Path, model: Any, pooling: int, rows: np.ndarray | None = None) -> Path:
    """A GGUF file of the decoder with a pooling type, and the rows of a head; our writer makes all but these."""
    import gguf

    from bifolio.model.gguf.mixes import parse_mix
    from bifolio.model.gguf.writer import write_gguf
    from bifolio.model.loader import load_model

    _, folder = decoder("Qwen3ForCausalLM", tied=True)
    plain = path.with_suffix(".plain.gguf")
    write_gguf(plain, load_model(folder), parse_mix("f32"))
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(path, "qwen3")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, inner = field.types[0], field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_uint32("qwen3.pooling_type", pooling)
    if rows is not None:
        writer.add_tensor("cls.output.weight", rows)
        writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
        writer.add_string("tokenizer.chat_template.rerank", "Q: {query} D: {document} A:")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_files_of_decoders_that_pool(tmp_path: Path) -> None:
    """The last token of an embedding model; the two answers of a reranker, whose prompt is in the file."""
    model, _ = decoder("Qwen3ForCausalLM", tied=True)
    with LLM(decoder_file(tmp_path / "e.gguf", model, 3)) as llm:
        (found,) = llm.embed(TEXTS[2])
        expected = pool(last_states(model.model, found.prompt_token_ids), "lasttoken")
    assert np.abs(found.outputs.data - expected).max() < 1e-5
    rows = model.lm_head.weight.detach().numpy()[[70, 90]]
    with LLM(decoder_file(tmp_path / "r.gguf", model, 4, rows)) as llm:
        scored = llm.score(QUERY, TEXTS)
    for text, each in zip(TEXTS, scored, strict=True):
        assert each.prompt_token_ids == token_ids(f"Q: {QUERY} D: {text} A:")
        logits = last_logits(model, each.prompt_token_ids)
        assert abs(each.outputs.score - 1 / (1 + np.exp(logits[90] - logits[70]))) < 1e-5
