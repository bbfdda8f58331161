"""Families are found by their files: a made-up one needs nothing else, and no other code compares architectures."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import GGUF_CASES, HF_CASES
from family_rows import ROWS
from whole_prompt import prompt_logits

import bifolio
from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ConfigError, UnsupportedModelError
from bifolio.model import families
from bifolio.model.families import all_families, family_of, family_of_gguf, family_of_hf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.loader import load_model
from bifolio.quant import QuantFormat
from exotic_weights import k_quant_llama
from helpers import tiny_folder
from syntax_trees import nodes, source_trees

SOURCES = Path(bifolio.__file__).parent
PROMPT = [1, 5, 17, 42, 8, 3]
PAPERCLIP = """
from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="paperclip",
    hf_types=("paperclip", "paperclip_text"),
    hf_class="PaperclipForCausalLM",
    network={"embedding_scale": 2.0},
    hf_names=replace(HF_LLAMA, down="mlp.shrink"),
    gguf_architectures=("fastener",),
    gguf_names=replace(GGUF_LLAMA, down="ffn_shrink"),
    gguf_interleaved=True,
)
"""


@pytest.fixture
def paperclip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family that exists as long as the test, by one module beside the others."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "paperclip.py").write_text(PAPERCLIP)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    all_families.cache_clear()
    yield
    sys.modules.pop("bifolio.model.families.paperclip", None)
    all_families.cache_clear()


def test_every_family_has_a_file_of_its_name_and_lines_in_the_table() -> None:
    folder = SOURCES / "model" / "families"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "family"}
    assert {family.name for family in all_families()} == names
    assert {family_of_hf(raw["model_type"]).name for raw in HF_CASES.values()} == names
    described = {family_of_gguf(str(case.metadata["general.architecture"]), "").name for case in GGUF_CASES.values()}
    rows = {family.name for family in all_families() if {family.name, *family.hf_types} & ROWS.keys()}
    assert described | rows >= {family.name for family in all_families() if family.gguf_architectures}


DENSE = ("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "granite", "internlm3", "llama",
         "ministral", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss",
         "stablelm", "starcoder2")  # fmt: skip


def test_a_family_like_llama_is_short() -> None:
    lines = {name: len((SOURCES / "model" / "families" / f"{name}.py").read_text().splitlines()) for name in DENSE}
    assert {name: count for name, count in lines.items() if count > 25} == {}


def test_a_made_up_family_is_loaded_from_a_folder_and_from_a_gguf_file(paperclip: None, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "paperclip_text"}))
    tensors = {name.replace("down_proj", "shrink"): value for name, value in open_tensors(folder).items()}
    write_safetensors(folder / "model.safetensors", tensors)

    model = load_model(folder)
    assert (model.config.architecture, model.config.embedding_scale) == ("paperclip", 2.0)
    expected = prompt_logits(model.weights, PROMPT)
    write_gguf(tmp_path / "m.gguf", model, QuantFormat.F32)
    from_gguf = load_model(tmp_path / "m.gguf")
    assert (from_gguf.config.architecture, from_gguf.config.rope_interleaved) == ("paperclip", True)
    np.testing.assert_allclose(prompt_logits(from_gguf.weights, PROMPT), expected, atol=1e-5, rtol=1e-4)
    write_folder(tmp_path / "back", from_gguf, QuantFormat.F32)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("paperclip", ["PaperclipForCausalLM"])
    np.testing.assert_allclose(
        prompt_logits(load_model(tmp_path / "back").weights, PROMPT), expected, atol=1e-5, rtol=1e-4
    )


def open_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = open_safetensors(folder / "model.safetensors").tensors
    return {name: np.array(tensor.dequantize()) for name, tensor in tensors.items()}


def test_a_made_up_family_is_named_for_similar_names(paperclip: None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'paperclips' is not .*similar: paperclip, paperclip_text; docs"):
        family_of_hf("paperclips")
    with pytest.raises(
        UnsupportedModelError, match=r"m\.gguf: the architecture 'fastner' is not .*similar: fastener; docs"
    ):
        family_of_gguf("fastner", "m.gguf")


def test_unknown_names_are_refused_with_the_nearest_ones_and_the_place_of_the_list(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'qwen3_mo' is not .*similar: qwen3_moe, .*; docs/models.md lists"
    ):
        family_of_hf("qwen3_mo")
    for name in (None, "xyz", ["llama"] * 100):
        with pytest.raises(
            UnsupportedModelError, match=r"is not supported.*; docs/models.md lists all that are"
        ) as found:
            family_of_hf(name)
        assert "llama, " not in str(found.value).partition("is not supported")[2]
    assert all(f"`{family.hf_types[0]}`" in (DOCS / "models.md").read_text("utf-8") for family in all_families())
    with pytest.raises(UnsupportedModelError, match="'samba' is not supported"):
        family_of(ModelConfig("samba", 10, 16, 2, 2, 1, 8, 16, 32, ropes=(RopeConfig(rotary_dim=8),)))
    content = k_quant_llama(tmp_path / "k.gguf").read_bytes().replace(b"llama", b"lambs")
    (tmp_path / "k.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"k\.gguf: the architecture 'lambs' is not supported.*; docs"):
        load_model(tmp_path / "k.gguf")


def test_two_families_cannot_claim_one_name(paperclip: None, tmp_path: Path) -> None:
    (tmp_path / "families" / "paperclip.py").write_text(PAPERCLIP.replace('"paperclip_text"', '"llama"'))
    with pytest.raises(ConfigError, match="'llama' and 'paperclip' both claim 'llama'"):
        all_families()


# -- the documentation -----------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("models_table", DOCS.parent / "scripts" / "models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_models_has_one_line_for_each_family_sorted_by_name() -> None:
    part = (DOCS / "models.md").read_text("utf-8").partition("<!-- families")[2].partition("<!-- end of families")[0]
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    listed = {cells[0].removeprefix("| "): cells for cells in rows}
    assert list(listed) == sorted(listed)
    assert listed.keys() == {family.name for family in all_families()}
    for family in all_families():
        assert listed[family.name][2] == ", ".join(f"`{name}`" for name in family.hf_types)
        expected = family.gguf_architectures or (family.written_as,)
        assert [name for name in expected if f"`{name}`" not in listed[family.name][3]] == []


def test_the_list_of_models_is_the_one_that_the_script_writes(script: Any) -> None:
    results, written = (json.loads(path.read_text("utf-8")) for path in (script.RESULTS, script.FAMILIES))
    assert written.keys() == {family.name for family in all_families()}
    text = script.PAGE.read_text("utf-8")
    assert script.page(text, script.table(results, written)) == text, "run python scripts/models_table.py"


def test_an_option_is_recorded_when_all_of_its_rows_passed(script: Any) -> None:
    def line(family: str, ok: bool, day: str) -> dict[str, Any]:
        return {"family": family, "kernels": "gpu", "entry": "folder", "option": "defaults", "ok": ok, "date": day}

    merged = script.merge({}, [line("lfm2", True, "2026-01-01"), line("lfm2", False, "2026-01-02")])
    merged = script.merge(merged, [line("glm", True, "2026-01-03")])
    assert merged["lfm2"]["gpu"]["folder"]["defaults"] == "failed"
    written = json.loads(script.FAMILIES.read_text("utf-8"))
    shown = {line.split(" | ")[0]: line.split(" | ")[6] for line in script.table(merged, written).splitlines()[4:]}
    assert (shown["| lfm2"], shown["| glm"]) == ("not recorded", "folder")
    assert script.merge(merged, [line("lfm2", True, "2026-01-04")])["lfm2"]["gpu"]["folder"]["defaults"] == "2026-01-04"


def test_the_walk_shows_the_code_as_it_is() -> None:
    """The excerpts of adding-a-model.md are lines of the family and of its row."""
    page = (DOCS / "adding-a-model.md").read_text("utf-8")
    sources = (SOURCES / "model" / "families" / "granite.py", Path(__file__).with_name("family_rows.py"))
    code = "".join(source.read_text("utf-8") for source in sources)
    excerpts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(excerpts) == 3
    assert [excerpt for excerpt in excerpts if excerpt not in code] == []


# -- the rest of the tree --------------------------------------------------------------------------------------------

NAMES = {"architecture", "model_type"}


def is_architecture(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in NAMES) or (isinstance(node, ast.Attribute) and node.attr in NAMES)


def compares_architectures(node: ast.AST) -> bool:
    """`architecture == ...`, `in`, `match`, a table that is looked up by it, or a test of how it begins."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return any(is_architecture(operand) for operand in (left, *others))
        case ast.Match(subject=subject):
            return is_architecture(subject)
        case ast.Subscript(slice=index):
            return is_architecture(index)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=arguments):
            looked_up = name == "get" and bool(arguments) and is_architecture(arguments[0])
            return looked_up or (name in ("startswith", "endswith") and is_architecture(value))
    return False


@pytest.mark.full
def test_no_other_code_compares_architectures() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in source_trees().items()
        if not path.startswith("model/families/")
        for node in nodes(tree, ast.Compare, ast.Match, ast.Subscript, ast.Call)
        if compares_architectures(node)
    ]
    assert found == []


def architecture_names() -> set[str]:
    """Names of families, folders and GGUF files, except words that code uses for other things."""
    names = {name for f in all_families() for name in (f.name, *f.hf_types, *f.gguf_architectures)}
    return names - {
        "llama",
        "gpt2",
        "mamba",
    }  # kinds of tokenizers and of recurrent layers; `llama` and `gpt2` can be trained from scratch


FAMILY_FILES = ("model/families/", "model/vision/families/", "model/encoders/", "text/tools/")


def test_a_family_touches_no_other_file() -> None:
    """No string outside the files of families is the name of a family, of its folders or of its GGUF files."""
    names = architecture_names()
    named_like_models = {
        "model/gguf/pretokenizers.py", "model/gguf/projector_types.py", "model/huggingface/ternary_weights.py",
        "measure/random_models.py",
    }  # fmt: skip
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in source_trees().items()
        if not path.startswith(FAMILY_FILES) and path not in named_like_models
        for node in nodes(tree, ast.Constant)
        if isinstance(node.value, str) and node.value in names
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["config.architecture == 'x'", "'x' != architecture", "m.architecture in ('x',)", "TABLE[config.architecture]",
     "TABLE.get(config.architecture, 1)", "model_type.startswith('x')", "raw.model_type not in y"],
)  # fmt: skip
def test_the_search_finds_comparisons(code: str) -> None:
    assert any(compares_architectures(node) for node in ast.walk(ast.parse(code)))
