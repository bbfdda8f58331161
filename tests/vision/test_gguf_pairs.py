"""Models in two GGUF files, text and tower: sizes, tokens and logprobs are those of transformers on the folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_pairs import KEYS, write_text, write_tower
from later_models import gemma4_large_model, gemma4_model, gemma4_unified_model, mistral3_model
from test_gemma3 import PROMPTS, SIZES, assert_equal_to_transformers
from vision_models import VisionModel, gemma3_model, idefics3_model, picture, qwen3_vl_model, qwen3_vl_moe_model

from bifolio import LLM
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.model.loader import load_model, open_text_model

pytestmark = pytest.mark.full  # they compare with transformers and its processors

GEMMA4 = {"gemma4": gemma4_model, "gemma4_large": gemma4_large_model, "gemma4_unified": gemma4_unified_model}
LARGE = {**SIZES, "num_blocks": 300, "max_model_len": 600}


def write_pair(name: str, folder: Path, dtype: type = np.float32) -> VisionModel:
    """`text.gguf` and `mmproj-text.gguf`."""
    text, tower = folder / "text.gguf", folder / "mmproj-text.gguf"
    if name == "gemma3":
        model = gemma3_model()
        write_text(model, text)
        write_tower(model, tower, "gemma3", dtype, **{KEYS.Projector.SCALE_FACTOR: 2})
    elif name == "smolvlm":
        model = idefics3_model()
        write_text(model, text)
        more = {KEYS.Projector.SCALE_FACTOR: 3, KEYS.PREPROC_IMAGE_SIZE: 120}
        write_tower(model, tower, "idefics3", dtype, **more)
    elif name == "mistral3":
        model = mistral3_model()
        write_text(model, text)
        write_tower(model, tower, "pixtral", dtype, **{KEYS.USE_GELU: False, KEYS.USE_SILU: True})
    elif name in GEMMA4:
        model = GEMMA4[name]()
        write_text(model, text)
        field = gguf.GGUFReader(text, "r+").fields["tokenizer.ggml.padding_token_id"]  # of the tokenizer, not config
        field.parts[field.data[0]][0] = model.model.config.text_config.pad_token_id
        more = {KEYS.USE_GELU: False, KEYS.Projector.SCALE_FACTOR: 3, KEYS.IMAGE_MAX_PIXELS: 70 * 12 * 12}
        write_tower(model, tower, "gemma4uv" if "unified" in name else "gemma4v", dtype, **more)
    else:
        model, experts = (qwen3_vl_model(), "") if name == "qwen3_vl" else (qwen3_vl_moe_model(), "moe")
        taps = model.model.config.vision_config.deepstack_visual_indexes
        sections = {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": len(taps)}
        write_text(model, text, f"qwen3vl{experts}", **sections)
        more = {KEYS.SPATIAL_MERGE_SIZE: 2, KEYS.IMAGE_MIN_PIXELS: 1024, KEYS.IMAGE_MAX_PIXELS: 8192,
                KEYS.IS_DEEPSTACK_LAYERS: [layer in taps for layer in range(4)]}  # fmt: skip
        write_tower(model, tower, "qwen3vl_merger", dtype, **more)
    return model


@pytest.mark.parametrize("name", ["gemma3", "smolvlm", "qwen3_vl", "qwen3_vl_moe", "mistral3", *GEMMA4])
def test_a_pair_equals_transformers(name: str, tmp_path: Path) -> None:
    model = write_pair(name, tmp_path)
    with LLM(tmp_path / "text.gguf", **LARGE) as llm:
        assert llm.model.vision is not None
        for text, sizes in PROMPTS.values():
            shapes = [(min(width, 90), max(height, 20)) for width, height in sizes]
            images = [picture(*shape, seed=number) for number, shape in enumerate(shapes)]
            assert_equal_to_transformers(model, llm, text.format(model.place), images)
        assert_equal_to_transformers(model, llm, "text alone", [])


def test_a_tower_in_sixteen_bits_reads_nearly_the_same(tmp_path: Path) -> None:
    """Files have matrices in f16; sizes and tokens stay."""
    model = write_pair("smolvlm", tmp_path, np.float16)
    found, whole = open_text_model(tmp_path / "text.gguf").vision, open_text_model(model.folder).vision
    assert found is not None
    assert whole is not None
    image = picture(70, 90)
    ours, theirs = found.read(image), whole.read(image)
    assert ours.text == theirs.text
    for one, other in zip(ours.tiles, theirs.tiles, strict=True):
        np.testing.assert_array_equal(one, other)
    with LLM(tmp_path / "text.gguf", **LARGE) as llm, LLM(model.folder, **LARGE) as folder:
        pixels = ours.tiles[0]
        readers = [each.engine.runner.images for each in (llm, folder)]
        rows = [np.asarray(reader.passes.rows(pixels)) for reader in readers if reader is not None]
    np.testing.assert_allclose(rows[0], rows[1], rtol=0.02, atol=0.02 * np.abs(rows[1]).max())


def test_the_tower_is_found_by_its_model_and_its_name(tmp_path: Path) -> None:
    """Towers of other models are left aside; of two that fit, the name decides; a folder is opened as its text."""
    model = write_pair("gemma3", tmp_path)
    write_tower(idefics3_model(), tmp_path / "mmproj-other.gguf", "idefics3", **{KEYS.Projector.SCALE_FACTOR: 3})
    assert load_model(tmp_path).tower is not None
    write_tower(model, tmp_path / "mmproj-b.gguf", "gemma3",
                **{KEYS.Projector.SCALE_FACTOR: 2, KEYS.IMAGE_MEAN: [0.25] * 3})  # fmt: skip
    vision = open_text_model(tmp_path / "text.gguf").vision
    assert vision is not None
    assert vision.normalisation.mean == (0.5, 0.5, 0.5)  # type: ignore[attr-defined]
    chosen = open_text_model(tmp_path / "text.gguf", tmp_path / "mmproj-b.gguf").vision
    assert chosen is not None
    assert chosen.normalisation.mean == (0.25, 0.25, 0.25)  # type: ignore[attr-defined]
    elsewhere = tmp_path / "alone"
    elsewhere.mkdir()
    (tmp_path / "text.gguf").rename(elsewhere / "text.gguf")
    assert open_text_model(elsewhere / "text.gguf").vision is None
    with LLM(elsewhere / "text.gguf", mmproj=tmp_path / "mmproj-text.gguf", **LARGE) as llm:
        assert_equal_to_transformers(model, llm, f"{model.place}what?", [picture(30, 50)])


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    model = write_pair("gemma3", tmp_path)
    text = tmp_path / "text.gguf"

    def tower(name: str, kind: str = "gemma3", source: VisionModel = model, **entries: object) -> Path:
        path = tmp_path / name
        write_tower(source, path, kind, **{KEYS.Projector.SCALE_FACTOR: 2, **entries})
        return path

    for path, error, said in (
        (text, ModelFileError, "holds no projector but a model of type gemma3"),
        (tmp_path / "none.gguf", ModelFileError, "none.gguf"),
        (tower("a.gguf", "resampler"), UnsupportedModelError, "projectors of type 'resampler' are not supported"),
        (tower("b.gguf", **{KEYS.PROJECTION_DIM: 32}), ModelFileError, "makes rows of 32 numbers and text.gguf takes"),
        (tower("c.gguf", "idefics3"), ModelFileError, "needs the token '<image>', which text.gguf lacks"),
        (tower("d.gguf", **{KEYS.USE_GELU: False}), UnsupportedModelError, "another activation than GELU"),
    ):
        with pytest.raises(error, match=said):
            load_model(text, path)
    with pytest.raises(ModelFileError, match="is the tower of a model: pass the file of the text model"):
        load_model(tmp_path / "mmproj-text.gguf")
    with pytest.raises(ConfigError, match=r"goes with a \.gguf file"):
        load_model(model.folder, tmp_path / "mmproj-text.gguf")
    with pytest.raises(ConfigError, match="mmproj goes with the path of a model"):
        LLM(load_model(text), mmproj=tmp_path / "mmproj-text.gguf")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes((tmp_path / "mmproj-text.gguf").read_bytes()[:3000])
    with pytest.raises(ModelFileError):
        load_model(text, damaged)
    assert gguf.GGUFReader(text).fields["general.architecture"].contents() == "gemma3"
