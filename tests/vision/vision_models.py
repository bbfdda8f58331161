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


def _saved(model: Any, processor: Any, tokenizer: Any, name: str, place: str) -> VisionModel:
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
    return _saved(model, processor, tokenizer, "gemma3-vision", marks[0])


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A `PIL.Image` of random colours."""
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)
