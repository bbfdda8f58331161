"""StableLM: layer norms, rope on a quarter of each head; some models run attention and MLP side by side."""

from bifolio.model.decoder_fields import NORM_EPS
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key

HEAD_NORMS = "StableLM models whose heads have layer norms of their own (StableLM 2 12B) are not supported"
PARALLEL = "use_parallel_residual"
BY_TENSOR = Key(PARALLEL, reader=lambda v: not v.header.has_tensor("blk.0.ffn_norm.weight"))

FAMILY = Family(
    name="stablelm",
    network={"norm": "layer"},
    fields=(NORM_EPS, Field("qkv_bias", hf="use_qkv_bias"), Field("parallel_block", hf=PARALLEL, gguf=BY_TENSOR)),
    hf_types=("stablelm",),
    hf_class="StableLmForCausalLM",
    hf_defaults={"partial_rotary_factor": 0.25},
    hf_implied={"output_bias": False},
    hf_always=("use_qkv_bias", "partial_rotary_factor"),
    hf_refused={"qk_layernorm": HEAD_NORMS},
    gguf_architectures=("stablelm",),
    gguf_refused={"blk.0.attn_q_norm.weight": HEAD_NORMS},
)
