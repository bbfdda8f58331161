"""Fields of wrong types and values in the JSON files of models and draft heads: they load or raise a named error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from family_cases import HF_CASES
from test_integer_weights import COLUMNS, GROUP, ROWS, config_of, random_parts, save, stored
from test_scaled_tensors import FP8, fp8_folder

from bifolio.errors import BifolioError, ModelFileError
from bifolio.model.eagle import is_eagle_folder, load_eagle
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.hf_loader import folder_tensors, load_folder
from draft_heads import EAGLE, eagle_folder
from helpers import TINY, tiny_folder, tiny_loaded

pytestmark = pytest.mark.full  # hundreds of folders
WRONG: tuple[Any, ...] = (None, "x", -1, 0, 0.5, 1e999, float("nan"), [], ["x"], [None], {}, {"x": {}}, 10**30, True)
HEADS_BY_FIELDS = [
    name for name, raw in HF_CASES.items() if {"num_nextn_predict_layers", "mtp_num_hidden_layers"} & raw.keys()
]


def changed(raw: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field, also of objects inside, with every wrong value: (a name for messages, the changed object)."""
    for field, value in raw.items():
        for wrong in WRONG:
            yield f"{'.'.join([*place, field])} = {wrong!r}", {**raw, field: wrong}
        if isinstance(value, dict):
            for name, inner in changed(value, (*place, field)):
                yield name, {**raw, field: inner}


def check(name: str, load: Callable[[], object]) -> bool:
    """Whether it loads; anything but a named error fails."""
    try:
        load()
    except BifolioError:
        return False
    except Exception as error:
        raise AssertionError(f"{name}: {error!r}") from error
    return True


def test_every_field_of_an_eagle_head() -> None:
    folder, target = eagle_folder(), tiny_loaded()
    more = {"target_hidden_size": None, "norm_before_residual": False, "quantization_config": None, "text_config": None,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "use_aux_hidden_state": True}}  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps({**EAGLE, **more}))
    assert check("unchanged", lambda: load_eagle(folder, target))
    for name, raw in changed({**EAGLE, **more}):
        path.write_text(json.dumps(raw))
        check(name, lambda: load_eagle(folder, target))
        if "architectures" in name:
            check(name, lambda: is_eagle_folder(folder))


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("architectures", 5, "a list of texts"),
        ("target_hidden_size", "wide", "an integer from 1"),
        ("draft_vocab_size", -1, "an integer from 1"),
        ("norm_before_residual", "x", "true or false"),
        ("eagle_config", [1], "an object"),
        ("eagle_aux_hidden_state_layer_ids", [0, 1.5, 2], "a list of integers"),
        ("hidden_size", "x", "an integer from 1 to 262144 in a llama model"),
        ("rope_theta", [1], "a number in a llama model"),
    ],
)
def test_an_error_of_a_head_names_file_field_and_value(field: str, value: Any, wanted: str) -> None:
    folder = eagle_folder()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ModelFileError) as raised:
        load_eagle(folder, tiny_loaded())
    for part in (str(path), field, repr(value), wanted):
        assert part in str(raised.value)


def test_every_field_of_a_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    assert check("unchanged", lambda: load_folder(folder))
    for name, raw in changed({**TINY, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "text_config": {}}):
        (folder / "config.json").write_text(json.dumps(raw))
        check(name, lambda: load_folder(folder))


def test_every_field_of_generation_config(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    for name, raw in changed({"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 5}):
        (folder / "generation_config.json").write_text(json.dumps(raw))
        check(name, lambda: load_folder(folder))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, "x"]}')
    with pytest.raises(ModelFileError, match=r"generation_config.json: eos_token_id is \[1, 'x'\]"):
        load_folder(folder)


@pytest.mark.parametrize("name", HEADS_BY_FIELDS)
def test_every_field_of_models_with_heads_for_several_tokens(name: str) -> None:
    assert HEADS_BY_FIELDS
    for field, raw in changed(HF_CASES[name]):
        check(field, lambda: config_from_hf(raw))  # noqa: B023


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq v2", "packed"])
def test_every_field_of_integer_weights(method: str, tmp_path: Path) -> None:
    save(tmp_path, stored(method, "a", random_parts(ROWS, COLUMNS, GROUP, True), GROUP))

    def load(raw: dict[str, Any]) -> None:
        folder_tensors(tmp_path, raw)["a.weight"].dequantize()

    assert check("unchanged", lambda: load(config_of(method)))
    for name, raw in changed(config_of(method)):
        try:
            check(name, lambda: load(raw))  # noqa: B023
        except AssertionError as error:  # the weights are those of a folder that is not quantised
            if not isinstance(error.__cause__, KeyError) or raw["quantization_config"]:
                raise


def test_every_field_of_fp8_weights(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path, "block")
    raw = json.loads((folder / "config.json").read_text())
    for method in ("fp8", "compressed-tensors"):
        known = {**FP8, "quant_method": method, "format": "float-quantized", "config_groups": {"g": {"weights": {}}}}
        for name, found in changed({"quantization_config": known}):
            (folder / "config.json").write_text(json.dumps({**raw, **found}))
            check(name, lambda: load_folder(folder).weights.layers[0].up.parts[0].dequantize())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (5, r"quantization_config is 5: it must be an object"),
        ({"quant_method": "awq", "group_size": "x"}, r"quantization_config.group_size is 'x': it must be an integer"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1e999}, r"quantization_config.group_size is inf"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": 3}},
         r"quantization_config.config_groups.a is 3: it must be an object"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": [1]}}},
         r"quantization_config.config_groups.a.weights is \[1\]: it must be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128, 10**30]}, r"weight_block_size is \[128, 1000.*list of int"),
    ],
)  # fmt: skip
def test_an_error_of_quantization_names_file_field_and_value(found: Any, message: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, quantization_config=found)
    with pytest.raises(ModelFileError, match=r"config.json: .*" + message):
        load_folder(folder)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({name: v for name, v in TINY.items() if name != "vocab_size"}))
    with pytest.raises(ModelFileError, match=r"config.json has no field 'vocab_size'"):
        load_folder(folder)
