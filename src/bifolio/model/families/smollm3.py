"""SmolLM3: Llama whose every fourth layer has no rope."""

from __future__ import annotations

from typing import Any

from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.window_fields import LOCAL, TYPES, layer_kinds, of_layers, write_upper

PERIOD = 4


def positions(values: Reading, period: int) -> tuple[int | None, ...]:
    """The rope of each layer: one layer of each period has none."""
    return tuple(0 if (layer + 1) % period else None for layer in values.layers)


def positions_from_hf(values: Reading) -> tuple[int | None, ...]:
    key = "no_rope_layers"  # 1: the layer has rope
    marks = values.json.counts(key, least=0, most=1)
    if not marks:
        return positions(values, values.json.count("no_rope_layer_interval", PERIOD))
    if len(marks) != len(values.layers):
        raise values.json.wrong(key, f"a list of {len(values.layers)} numbers")
    return tuple(0 if has_rope else None for has_rope in marks)


def windows_from_hf(values: Reading) -> tuple[int | None, ...]:
    """By `layer_types`, or else a window on layers without rope."""
    if not values.json.flag("use_sliding_window", False):
        return ()
    if values.json.get(TYPES) is not None:
        return of_layers(values, [kind == LOCAL for kind in layer_kinds(values)])
    return of_layers(values, [rope is None for rope in values["layers.rope"]])


def check_positions(values: Writing) -> dict[str, Any]:
    if any((rope is None) != ((layer + 1) % PERIOD == 0) for layer, rope in enumerate(values["layers.rope"])):
        raise values.refusal("other layers without rope than every fourth")
    return {}


FAMILY = Family(
    name="smollm3",
    fields=(
        Field("layers.window", hf=Form(windows_from_hf, write_upper)),
        Field(
            "layers.rope",
            hf=Form(positions_from_hf, lambda v: {"no_rope_layers": [int(n is not None) for n in v["layers.rope"]]}),
            gguf=Form(lambda v: positions(v, PERIOD), check_positions),
        ),
    ),
    hf_types=("smollm3",),
    hf_class="SmolLM3ForCausalLM",
    hf_defaults={"tie_word_embeddings": True, "rope_theta": 2000000.0},
    hf_always=("attention_bias", "mlp_bias"),
    hf_written={"pad_token_id": None},
    gguf_architectures=("smollm3",),
    gguf_interleaved=True,
)
