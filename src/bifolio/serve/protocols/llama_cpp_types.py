"""Requests of llama.cpp's server. Every field is bounded, as in `serve.protocols.openai_types`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.openai_types import Ignored, Name, Strict, Text, TokenIds

Setting = Annotated[float, Meta(ge=-1e9, le=1e9)] | bool
Window = Annotated[int, Meta(ge=-1, le=p.BIG)]
Bias = Annotated[list[Annotated[list[Annotated[float, Meta(ge=-1e9, le=1e9)]], Meta(min_length=2, max_length=2)]],
                 Meta(max_length=4096)]  # fmt: skip


class MediaPrompt(Strict, kw_only=True):
    """A text with `<__media__>` in the place of each image."""

    prompt_string: Text
    multimodal_data: Annotated[list[p.Url], Meta(max_length=256)]  # base64


class LlamaCppRequest(Strict, kw_only=True):
    """A completion."""

    prompt: Text | TokenIds | MediaPrompt
    n_predict: Annotated[int, Meta(ge=-2, le=p.BIG)] = -1  # negative: no limit
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=p.BIG)] | None = None
    top_p: p.Probability | None = None
    min_p: p.Probability | None = None
    typical_p: p.Share | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: Window | None = None  # 0: no penalties; other numbers: they count all tokens
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=1024)] | None = None
    dry_penalty_last_n: Window | None = None  # 0: no DRY; -1: all tokens
    dry_sequence_breakers: Annotated[list[p.Word], Meta(max_length=64)] | None = None
    xtc_probability: p.Probability | None = None
    xtc_threshold: p.Probability | None = None
    samplers: Annotated[list[Name], Meta(max_length=32)] | None = None  # all others are off; their order is fixed
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None  # -1: a random one
    ignore_eos: bool | None = None
    logit_bias: Bias | None = None  # pairs of a token id and a bias
    json_schema: p.Schema | None = None
    return_tokens: bool = False
    timings_per_token: bool = False  # `timings` in every event of a stream
    response_fields: Annotated[list[Name], Meta(max_length=64)] | None = None  # "content", "timings/prompt_n"
    stop: p.Stop | None = None
    model: Name | None = None
    # refused, but for the value that means "off"
    grammar: Annotated[str, Meta(max_length=0)] | None = None
    n_probs: Setting | None = None
    post_sampling_probs: Setting | None = None
    mirostat: Setting | None = None
    min_keep: Setting | None = None
    dynatemp_range: Setting | None = None
    # see IGNORED
    mirostat_tau: Setting | None = None
    mirostat_eta: Setting | None = None
    dynatemp_exponent: Setting | None = None
    cache_prompt: bool | None = None
    id_slot: Setting | None = None
    n_keep: Setting | None = None
    n_indent: Setting | None = None
    t_max_prompt_ms: Setting | None = None
    t_max_predict_ms: Setting | None = None


class InfillFile(Strict, kw_only=True):
    """A file, or a part of one, that the model sees before the gap."""

    text: Text
    filename: Name = "tmp"


class InfillRequest(LlamaCppRequest, kw_only=True):
    """A text with a gap between `input_prefix` with `prompt`, and `input_suffix`."""

    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[InfillFile], Meta(max_length=1024)] | None = None
    prompt: Text = ""


NEUTRAL = {"mirostat": 0, "min_keep": 0, "dynatemp_range": 0, "post_sampling_probs": False}  # other values are refused
NO_TIME = "n_predict limits the output, and --request-timeout of the server the time"
IGNORED: Ignored = {
    LlamaCppRequest: {
        "mirostat_tau": "it belongs to mirostat, which must be 0",
        "mirostat_eta": "it belongs to mirostat, which must be 0",
        "dynatemp_exponent": "it belongs to dynatemp_range, which must be 0",
        "cache_prompt": "prompts are always taken from the cache where it has them",
        "id_slot": "the scheduler chooses the slots",
        "n_keep": "the context is never shifted",
        "n_indent": "lines of any indentation are returned",
        "t_max_prompt_ms": NO_TIME,
        "t_max_predict_ms": NO_TIME,
    },
}
