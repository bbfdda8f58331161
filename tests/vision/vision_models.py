"""Small random models that read images, made by transformers with its processors: the oracle of towers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from helpers import fresh_folder, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class VisionModel:
    """A model of transformers, its processor, and the folder of both."""

    model: Any
    processor: Any
    folder: Path
    place: str  # of an image in a prompt
    masks_as_generated: bool = False  # `forward` by itself has other masks than `generate`

    def inputs(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        found = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        return dict(found)

    def logits(self, text: str, images: Sequence[Any], after: Sequence[int] = ()) -> np.ndarray:
        """f32[t, vocab] of the prompt and the tokens after it."""
        import torch

        inputs = self.inputs(text, images)
        if after:
            more = torch.tensor([list(after)])
            inputs["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in inputs:
                    inputs[name] = torch.cat([inputs[name], torch.zeros_like(more)], dim=1)
        if self.masks_as_generated:
            blank = torch.zeros((*inputs["input_ids"].shape, 1))
            inputs["attention_mask"] = self.model.create_masks_for_generate(
                self.model.config.get_text_config(), blank, inputs["attention_mask"], None,
                torch.arange(blank.shape[1])[None], inputs["mm_token_type_ids"],
            )  # fmt: skip
        with torch.no_grad():
            return np.asarray(self.model(**inputs).logits[0].float().numpy())


def tokenizer_with(special: Sequence[str], **names: str) -> Any:
    """A tokenizer of transformers with these special tokens."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer().to_str())
    backend.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>", **names
    )


def saved(model: Any, processor: Any, tokenizer: Any, name: str, place: str) -> VisionModel:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.02))
    folder = fresh_folder(name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    values = processor.image_processor.to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(values, default=str))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", place))
    return VisionModel(model, processor, folder, place)


@cache
def gemma3_model(window: int = 40, seed: int = 0) -> VisionModel:
    import torch
    import transformers as tf
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    marks = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    tokenizer = tokenizer_with(
        marks, boi_token=marks[0], eoi_token=marks[1], image_token=marks[2], extra_special_tokens={
            "boi_token": marks[0], "eoi_token": marks[1], "image_token": marks[2]}
    )  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids(list(marks))
    torch.manual_seed(seed)
    config = tf.Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": window,
            "query_pre_attn_scalar": 20, "max_position_embeddings": 1024, "initializer_range": 0.08,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "bos_token_id": 0,
            "eos_token_id": 0, "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 48, "patch_size": 6, "vision_use_head": False,
        },
        mm_tokens_per_image=16, boi_token_index=ids[0], eoi_token_index=ids[1], image_token_index=ids[2],
        attn_implementation="eager",
    )  # fmt: skip
    model = tf.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    image_processor = Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    processor = tf.Gemma3Processor(image_processor, tokenizer, image_seq_length=16)
    return saved(model, processor, tokenizer, "gemma3-vision", marks[0])


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A `PIL.Image` of random colours."""
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def values_of(vision: Any, pixels: np.ndarray) -> np.ndarray:
    """f32[3, height, width]: the values of a tile's bytes."""
    return np.asarray(vision.normalisation.values[pixels, np.arange(3)].transpose(2, 0, 1))


@dataclass(frozen=True)
class QwenProcessor:
    """`Qwen3VLProcessor` without videos, whose processor needs torchvision."""

    image_processor: Any
    tokenizer: Any
    image_token: int

    def __call__(self, text: str, images: list[Any] | None, return_tensors: str) -> dict[str, Any]:
        inputs = {} if images is None else dict(self.image_processor(images, return_tensors=return_tensors))
        pieces = text.split("<|image_pad|>")
        for number, grid in enumerate(inputs.get("image_grid_thw", ())):
            pieces[number] += "<|image_pad|>" * (int(grid.prod()) // self.image_processor.merge_size**2)
        inputs["input_ids"] = self.tokenizer("".join(pieces), return_tensors="pt")["input_ids"]
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.image_token).int()
        return inputs


@cache
def idefics3_model(kind: str = "SmolVLM", seed: int = 0) -> VisionModel:
    """`kind`: SmolVLM or Idefics3, which differ in names alone."""
    import torch
    import transformers as tf
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    tokenizer = tokenizer_with(marks)
    torch.manual_seed(seed)
    config = getattr(tf, f"{kind}Config")(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.08,
            "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 48, "patch_size": 8,
        },
        scale_factor=3, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).float().eval()
    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 120}, max_image_size={"longest_edge": 48}, return_row_col_info=True
    )
    processor = tf.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    return saved(model, processor, tokenizer, kind.lower(), "<image>")


def _qwen_model(kind: str, text: dict[str, Any], vision: dict[str, Any], seed: int) -> VisionModel:
    """A model of Qwen's with the tower of Qwen3-VL."""
    import torch
    import transformers as tf
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = tokenizer_with(marks)
    ids = tokenizer.convert_tokens_to_ids(list(marks))
    torch.manual_seed(seed)
    common = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "initializer_range": 0.08, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 0, "tie_word_embeddings": True,
    }  # fmt: skip
    tower = {
        "hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 4, "patch_size": 8, "out_hidden_size": 64,
        "num_position_embeddings": 36,
    }  # fmt: skip
    config = getattr(tf, f"{kind}Config")(
        text_config={**common, **text}, vision_config={**tower, **vision}, vision_start_token_id=ids[0],
        vision_end_token_id=ids[1], image_token_id=ids[2], video_token_id=ids[3], tie_word_embeddings=True,
        attn_implementation="eager",
    )  # fmt: skip
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).float().eval()
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 1024, "longest_edge": 8192}
    )
    processor = QwenProcessor(image_processor, tokenizer, ids[2])
    return saved(model, processor, tokenizer, kind.lower(), f"{marks[0]}{marks[2]}{marks[1]}")


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, "mrope_interleaved": True, **more}


@cache
def qwen3_vl_moe_model(seed: int = 0) -> VisionModel:
    text = {
        "num_hidden_layers": 3, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "rope_parameters": _rope([4, 2, 2]),
    }  # fmt: skip
    return _qwen_model("Qwen3VLMoe", text, {"deepstack_visual_indexes": [1, 2]}, seed)


@cache
def qwen3_5_model(seed: int = 0) -> VisionModel:
    text = {
        "num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 96, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": _rope([2, 1, 1], partial_rotary_factor=0.25),
    }  # fmt: skip
    return _qwen_model("Qwen3_5", text, {}, seed)


@cache
def qwen3_vl_model(seed: int = 0) -> VisionModel:
    text = {"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 96, "rope_parameters": _rope([4, 2, 2])}
    return _qwen_model("Qwen3VL", text, {"deepstack_visual_indexes": [0, 2, 1]}, seed)
