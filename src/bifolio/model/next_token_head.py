"""Heads for multi-token prediction that come with a model: one more layer behind its last one, as a draft head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bifolio.config import ModelConfig
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Linear, Norm
from bifolio.model.draft_head import HeadWeights, LoadedHead, split_columns
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.model_file import ModelFile
from bifolio.model.next_token_names import NextTokenNames
from bifolio.model.tensor_names import assemble_layer


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a head in the files of its model."""

    file: ModelFile
    names: NextTokenNames
    number: int  # of the layer

    def name(self, template: str) -> str:
        return template.format(self.number) + ".weight"

    def has(self, template: str) -> bool:
        return bool(template) and self.file.source.has(self.name(template))

    def norm(self, template: str, config: ModelConfig) -> Norm:
        weight = self.file.vector(self.name(template), (config.hidden_size,))
        return Norm(weight + config.norm_offset if config.norm_offset else weight, None, config.norm_eps)

    def linear(self, template: str, rows: int, columns: int) -> Linear:
        return Linear((self.file.matrix(self.name(template), (rows, columns)),), (None,))


def load_next_token_head(file: ModelFile, target: LoadedModel) -> LoadedHead:
    """The first head for multi-token prediction in the files of a model; ConfigError if there is none."""
    config, path = target.config, file.text.path
    family = family_of(config)
    names = family.gguf_next_token if file.names == family.gguf_names else family.hf_next_token
    if names is None:
        raise ConfigError(
            f"models of the family {family.name} have no head for speculative method 'mtp': choose another"
        )
    tensors = _Tensors(file, names, config.num_layers)
    if not tensors.has(names.joint):
        raise ConfigError(
            f"{path} has no head for speculative method 'mtp' ({tensors.name(names.joint)}): use files that include it"
        )
    return LoadedHead(path, _weights(tensors, target, head_config(config)))


def head_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the head's layer: that of the last attention layer, with experts if the model has any.

    A head attends to all positions: its drafts are checked, and contexts of few positions need no choice.
    """
    last = config.attention_layers[-1]
    mla = None if config.mla is None else replace(config.mla, index_heads=0, index_size=0, index_top_k=0)
    return replace(
        config,
        num_layers=1,
        layers=(replace(config.layers[last], recurrent=False, mlp=True, dense=False, kv_source=None, chooses=True),),
        recurrent=None,
        mla=mla,
    )


def _weights(tensors: _Tensors, target: LoadedModel, config: ModelConfig) -> HeadWeights:
    names, file, d, vocab = tensors.names, tensors.file, config.hidden_size, config.vocab_size
    joint = file.matrix(tensors.name(names.joint), (d, 2 * d))
    token_part, hidden_part = split_columns(joint, d)
    layer = assemble_layer(config, file.names, names.layer.format(tensors.number), file.matrix, file.vector)
    return HeadWeights(
        config=config,
        kind="mtp",
        taps=(target.config.num_layers,),
        state_size=d,
        state_scale=1.0,  # the norm that follows contains it
        merge=None,
        state_norm=target.weights.final_norm,
        chains_normed=names.chains_normed,
        embedding=file.matrix(tensors.name(names.embedding), (vocab, d)) if tensors.has(names.embedding) else None,
        token_norm=tensors.norm(names.token_norm, config),
        hidden_norm=tensors.norm(names.hidden_norm, config),
        token_part=Linear((token_part,), (None,)),
        hidden_part=Linear((hidden_part,), (None,)),
        layer=layer,
        final_norm=tensors.norm(names.final_norm, config)
        if tensors.has(names.final_norm)
        else target.weights.final_norm,
        head=tensors.linear(names.head, vocab, d) if tensors.has(names.head) else None,
        inverse_frequencies=target.weights.inverse_frequencies,
        rope_scales=target.weights.rope_scales,
    )
