"""Small random models of Gemma 4 and Mistral 3 that read images, made by transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from vision_models import VisionModel, saved, tokenizer_with


@dataclass(frozen=True)
class Gemma4Processor:
    """`Gemma4Processor` without videos and sound, whose processors need torchvision and a feature extractor."""

    image_processor: Any
    tokenizer: Any
    image_token: int

    def __call__(self, text: str, images: list[Any] | None, return_tensors: str) -> dict[str, Any]:
        import torch

        inputs = {} if images is None else dict(self.image_processor(images, return_tensors=return_tensors))
        first, *others = text.split("<|image|>")
        counts = inputs.pop("num_soft_tokens_per_image", [])
        for count, after in zip(counts, others, strict=True):
            first += f"<|image>{'<|image|>' * int(count)}<image|>{after}"
        inputs["input_ids"] = self.tokenizer(first, return_tensors="pt")["input_ids"]
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.image_token).int()
        return inputs


class UnifiedImages:
    """The processor of images of Gemma 4 "unified", which needs torchvision, on that of Gemma 4: patches are merged."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def to_dict(self) -> dict[str, Any]:
        return dict(self.inner.to_dict())

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        import torch

        found = self.inner(images, return_tensors="np")
        pool, size = self.inner.pooling_kernel_size, self.inner.patch_size
        values, places = [], []
        for patches, positions in zip(found["pixel_values"], found["image_position_ids"], strict=True):
            width, height = (int(positions[:, axis].max()) + 1 for axis in range(2))
            grid = patches[: width * height].reshape(height // pool, pool, width // pool, pool, size, size, 3)
            merged = grid.transpose(0, 2, 1, 4, 3, 5, 6).reshape(height * width // pool**2, -1)
            columns, rows = np.meshgrid(np.arange(width // pool), np.arange(height // pool))
            own = np.stack([columns, rows], axis=-1).reshape(-1, 2)
            missing = self.inner.max_soft_tokens - len(merged)
            values.append(np.pad(merged, ((0, missing), (0, 0))))
            places.append(np.pad(own, ((0, missing), (0, 0)), constant_values=-1))
        return {
            "pixel_values": torch.tensor(np.stack(values)),
            "image_position_ids": torch.tensor(np.stack(places)),
            "num_soft_tokens_per_image": found["num_soft_tokens_per_image"],
        }


GEMMA4_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 24, "max_position_embeddings": 1024, "initializer_range": 0.08,
    "num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4_TOWER = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 3,
    "position_embedding_size": 256,
}  # fmt: skip


def _gemma4(kind: str, text: dict[str, Any], tower: dict[str, Any], seed: int, name: str) -> VisionModel:
    import torch
    import transformers as tf
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    marks = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>")
    tokenizer = tokenizer_with(marks)
    ids = tokenizer.convert_tokens_to_ids(list(marks))
    torch.manual_seed(seed)
    config = getattr(tf, f"{kind}Config")(
        text_config={**GEMMA4_TEXT, "vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer), **text},
        vision_config=tower, audio_config=None, boi_token_id=ids[0], image_token_id=ids[1], eoi_token_id=ids[2],
        video_token_id=ids[3], audio_token_id=ids[4], attn_implementation="eager",
    )  # fmt: skip
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for key, buffer in model.named_buffers():
        if key.endswith(("std_bias", "std_scale")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) + 1)
        elif key.endswith(("put_min", "put_max")):
            side = -1 if key.endswith("min") else 1
            buffer.fill_(side * float(0.3 + torch.rand((), generator=generator)))
    images: Any = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=70)
    if kind == "Gemma4Unified":
        with torch.no_grad():
            torch.nn.init.normal_(model.model.embed_vision.pos_embedding)
        images = UnifiedImages(images)
    else:
        with torch.no_grad():
            torch.nn.init.normal_(model.model.vision_tower.patch_embedder.position_embedding_table)
    return saved(model, Gemma4Processor(images, tokenizer, ids[1]), tokenizer, name, marks[1])


@cache
def gemma4_model(seed: int = 0) -> VisionModel:
    """The small models: layers have inputs and share keys and values, products of the tower have bounds."""
    text = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    return _gemma4("Gemma4", text, {**GEMMA4_TOWER, "use_clipped_linears": True}, seed, "gemma4-vision")


@cache
def gemma4_large_model(seed: int = 0) -> VisionModel:
    """The large models: tokens of an image see each other, keys are values, the tower's values are standardised."""
    text = {
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }  # fmt: skip
    return _gemma4("Gemma4", text, {**GEMMA4_TOWER, "standardize": True}, seed, "gemma4-large-vision")


@cache
def gemma4_unified_model(seed: int = 0) -> VisionModel:
    tower = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 48, "mm_posemb_size": 128,
             "output_proj_dims": 48}  # fmt: skip
    return replace(_gemma4("Gemma4Unified", {}, tower, seed, "gemma4-unified"), masks_as_generated=True)


@cache
def mistral3_model(kind: str = "mistral", seed: int = 0) -> VisionModel:
    """`kind`: of the text network, mistral or ministral3."""
    import torch
    import transformers as tf
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    marks = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    tokenizer = tokenizer_with(marks)
    torch.manual_seed(seed)
    config = tf.Mistral3Config(
        text_config={
            "model_type": kind, "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "initializer_range": 0.08, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0,
            "pad_token_id": 0, "sliding_window": None, "tie_word_embeddings": False,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 96, "patch_size": 6, "hidden_act": "silu",
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"), spatial_merge_size=2, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    model = tf.Mistral3ForConditionalGeneration(config).float().eval()
    image_processor = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 6, "width": 6})
    processor = PixtralTexts(image_processor, tokenizer, 12)
    return saved(model, processor, tokenizer, f"mistral3-{kind}", "[IMG]")


@dataclass(frozen=True)
class PixtralTexts:
    """`PixtralProcessor`, which needs torchvision."""

    image_processor: Any
    tokenizer: Any
    square: int  # pixels of an edge

    def images(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        return dict(self.image_processor(images, patch_size=self.square, return_tensors=return_tensors))

    def __call__(self, text: str, images: list[Any] | None, return_tensors: str) -> dict[str, Any]:
        import torch

        inputs = {} if images is None else self.images(images, return_tensors)
        first, *others = text.split("[IMG]")
        for (height, width), after in zip(inputs.get("image_sizes", ()), others, strict=True):
            line = "[IMG]" * (int(width) // self.square)
            first += "[IMG_BREAK]".join([line] * (int(height) // self.square)) + "[IMG_END]" + after
        inputs["input_ids"] = self.tokenizer(first, return_tensors="pt")["input_ids"]
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs
