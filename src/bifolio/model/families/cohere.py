"""Command R and Aya 23 (Cohere 1): Cohere 2 with rope on all layers, and without windows."""

from bifolio.model.families.cohere2 import FIELDS, NETWORK
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key

CONTEXT = Key(("model_max_length", "max_position_embeddings"), written="max_position_embeddings")
HEAD_NORMS = "Command R+, whose heads have layer norms of their own, is not supported"

FAMILY = Family(
    name="cohere",
    network=NETWORK,
    fields=(*FIELDS, Field("max_position", hf=CONTEXT)),
    hf_types=("cohere",),
    hf_class="CohereForCausalLM",
    hf_defaults={"logit_scale": 0.0625, "max_position_embeddings": 8192, "rope_theta": 500000.0,
                 "tie_word_embeddings": True, "bos_token_id": 5, "eos_token_id": 255001},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias",),
    hf_written={"use_qk_norm": False},
    hf_refused={"use_qk_norm": HEAD_NORMS},
    gguf_architectures=("command-r",),
    gguf_refused={"blk.0.attn_q_norm.weight": HEAD_NORMS},
    hf_interleaved=True, gguf_interleaved=True,
)  # fmt: skip
