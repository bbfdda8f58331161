"""The reference operations on torch tensors: differentiable, on any device, with torch's fused functions.

The results are those of `ReferenceKernels` up to rounding. Training and GPUs without Triton use this set. Attention of
a fresh segment whose sequences are equally long (training, a batch of equal prompts) and of a decode segment is one
call for the whole segment; other segments run sequence by sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from bifolio.errors import ConfigError, PhaseError
from bifolio.kernels.entries import Entries
from bifolio.kernels.host_experts import OF_EXPERTS, HostExperts
from bifolio.kernels.interface import (
    LEAST_MEAN_SQUARE,
    SILU_LIMIT,
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    Adapter,
    AdapterUse,
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    Experts,
    HeadLinear,
    Heads,
    Linear,
    Network,
    Norm,
    Recurrence,
    Rotation,
    Router,
    Routing,
    Segments,
    StepProgram,
    Storage,
    XieluCoefficients,
)
from bifolio.kernels.torch_adapters import DOWN, UP, adapted, adapted_embedding, adapted_logits, of_expert, on_torch
from bifolio.kernels.torch_arrays import TorchArrays
from bifolio.kernels.torch_attention import attend_cached, attend_fresh, rotate, scale_by_position
from bifolio.kernels.torch_choice import TorchChoice
from bifolio.kernels.torch_recurrence import prepare_vectors, recur, scan
from bifolio.kernels.torch_routing import mix_sparsely, scores_of
from bifolio.long_rope import LONG_ROPE, set_of
from bifolio.quant.formats import READABLE_FORMATS
from bifolio.quant.tensor import QuantizedTensor


class TorchKernels(Entries, TorchArrays, TorchChoice):
    """Dense weights in `dtype`; quantised files are dequantised when they are prepared."""

    name = "torch"
    formats = READABLE_FORMATS  # dequantised when prepared
    deterministic = False

    def record(self, network: Network, phase: AttentionPhase) -> StepProgram | None:
        return None

    # -- weights ------------------------------------------------------------------------------------------
    def prepare_linear(self, linear: Linear) -> Linear:
        """Concatenate parts that share an input; `prepared` is (weight, bias or None)."""
        parts = tuple(self.tensor(part) for part in linear.parts)
        biases = tuple(None if bias is None else self.tensor(bias) for bias in linear.biases)
        weight, bias = _fuse(parts, biases)
        views = torch.split(weight, [part.shape[0] for part in parts])  # one copy in memory
        return Linear(views, biases, (weight, bias), linear.shards, linear.site)

    def prepare_norm(self, norm: Norm) -> Norm:
        bias = None if norm.bias is None else self.vector(norm.bias)
        return Norm(self.vector(norm.weight), bias, norm.eps, norm.centered)

    def prepare_experts(self, experts: Experts) -> Experts:
        """`prepared` is (weight [experts, out, in], bias [experts, out] or None) of up and of down."""
        if experts.host is not None:
            return HostExperts.prepared(experts, self)

        def stacked(linears: tuple[Linear, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
            fused = [self.prepare_linear(linear).prepared for linear in linears]
            bias = None if fused[0][1] is None else torch.stack([bias for _, bias in fused])
            return torch.stack([weight for weight, _ in fused]), bias

        return replace(experts, prepared=(stacked(experts.up), stacked(experts.down)))

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear:
        """`prepared` is [heads, out, in]."""
        return replace(linear, prepared=torch.stack([self.prepare_linear(head).prepared[0] for head in linear.heads]))

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        return self.tensor(table)

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence:
        return prepare_vectors(recurrence, self.vector)

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        if self.has_host_experts and adapter.experts:
            raise ConfigError(OF_EXPERTS)
        return on_torch(adapter, self.tensor)

    # -- the network --------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float, *, is_partial: bool = False) -> Array:
        rows = F.embedding(torch.where(ids < table.shape[0], ids, 0) if is_partial else ids, table)
        return rows if scale == 1.0 else rows * scale

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        angles = (positions % LONG_ROPE).to(inverse_frequencies.dtype)[:, None] * set_of(inverse_frequencies, positions)
        return Rotation(angles.cos() * scale, angles.sin() * scale)

    def norm(self, x: Array, norm: Norm) -> Array:
        size = (norm.weight.shape[0],)
        y = x.float().reshape(-1, *size)
        weight = torch.as_tensor(norm.weight, device=x.device).float()  # ones of norms without weights are on the host
        if norm.centered:
            y = F.layer_norm(y, size, weight, None if norm.bias is None else norm.bias.float(), norm.eps)
        else:
            y = F.rms_norm(y, size, weight, norm.eps)
            y = y if norm.bias is None else y + norm.bias
        return y.reshape(x.shape).to(x.dtype)

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        return x + y if scale == 1.0 else (x + y) * scale

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        x = x + delta
        return x, self.norm(x, norm)

    def linear(self, x: Array, linear: Linear) -> Array:
        weight, bias = linear.prepared or _fuse(linear.parts, linear.biases)
        return F.linear(x.to(weight.dtype), weight, bias)  # rows in place of embeddings are f32

    def adapt_embedding(self, x: Array, ids: Array, scale: float, adapters: AdapterUse) -> Array:
        return adapted_embedding(x, ids, scale, adapters)

    def adapt(self, y: Array, x: Array, site: int, adapters: AdapterUse) -> Array:
        return adapted(y, x, site, adapters)

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        weight = linear.prepared
        if weight is None:
            parts: list[Any] = [head.parts[0] for head in linear.heads]
            weight = torch.stack(parts)
        heads = x.unflatten(-1, (weight.shape[0], -1))[..., start : start + weight.shape[2]]
        return torch.bmm(heads.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).flatten(1)

    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        size = latent.shape[-1] - rope
        heads = absorbed.shape[-1] // size
        turned = query.unflatten(-1, (heads, -1))[..., -rope:]
        queries = torch.cat([turned, absorbed.unflatten(-1, (heads, size))], dim=-1)
        key = torch.cat([latent[:, size:], self.norm(latent[:, :size], norm)], dim=-1)
        return torch.cat([queries.flatten(1), key, key], dim=-1)

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        if shape.queries_only:
            return Heads(self._turned(qkv.unflatten(-1, (heads, dim)), shape.query_norm, shape, rotation), None, None)
        query, key, value = qkv.unflatten(-1, (heads + 2 * kv_heads, dim)).split((heads, kv_heads, kv_heads), dim=1)
        query = self._turned(query, shape.query_norm, shape, rotation)
        key = self._turned(key, shape.key_norm, shape, rotation)
        value = self._norm_heads(value, shape.value_norm)
        if storage is not None and batch.cache_index is not None:
            storage.write(shape.layer, batch.cache_index, key, value)
        return Heads(query, key, value)

    def _turned(
        self, heads: torch.Tensor, norm: Norm | None, shape: AttentionShape, rotation: Rotation | None
    ) -> torch.Tensor:
        """Heads normed and rotated, in the order of the layer."""
        heads = heads if shape.norm_after_rope else self._norm_heads(heads, norm)
        heads = heads if rotation is None else rotate(heads, rotation, shape.rope_interleaved)
        return self._norm_heads(heads, norm) if shape.norm_after_rope else heads

    def _norm_heads(self, heads: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Norm each head, or all heads of a token together if the norm is wider than a head."""
        if norm is None:
            return heads
        rows = heads.reshape(-1, norm.weight.shape[0])
        return torch.reshape(self.norm(rows, norm), heads.shape)

    def attend(self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None) -> Array:
        outputs = [self._attend_segment(heads, shape, segment, storage) for segment in segments]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def act_mul(self, x: Array, activation: str, cutoff: float | None = None) -> Array:
        gate, up = x.chunk(2, dim=-1)
        if cutoff is not None:
            spread, mean = torch.std_mean(gate.float(), dim=-1, keepdim=True, correction=0)
            return (self.act(F.relu(gate - (mean + spread * cutoff)), activation) * up).to(x.dtype)
        if activation == "swiglu_clamped":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * torch.sigmoid(SWIGLU_SLOPE * gate) * (up + 1)
        if activation == "silu_clamped":
            return F.silu(gate.clamp(max=SILU_LIMIT)) * up.clamp(-SILU_LIMIT, SILU_LIMIT)
        return self.act(gate, activation) * up

    def act(self, x: Array, activation: str) -> Array:
        if activation == "silu":
            return F.silu(x)
        if activation == "relu":
            return F.relu(x)
        if activation == "relu2":
            return F.relu(x).square()
        if activation == "tanh":
            return torch.tanh(x)
        if activation == "sigmoid":
            return torch.sigmoid(x)
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def clamp(self, x: Array, least: Array, most: Array) -> Array:
        return torch.clamp(x.float(), least, most).to(x.dtype)

    def xielu(self, x: Array, coefficients: XieluCoefficients) -> Array:
        values, (positive, negative, linear, most) = x.float(), coefficients
        below = negative * (torch.expm1(values.clamp(max=most)) - values)
        return (linear * values + torch.where(values > 0, positive * values.square(), below)).to(x.dtype)

    def weigh(self, x: Array, routing: Routing) -> Array:
        return (x * routing.weights[:, :1]).to(x.dtype)

    def gate(self, x: Array, logits: Array) -> Array:
        parts = x.reshape(*logits.shape, x.shape[-1] // logits.shape[-1])
        return (torch.sigmoid(logits.float()).to(x.dtype)[..., None] * parts).reshape(x.shape)

    def route(self, logits: Array, router: Router) -> Routing:
        """Of equal scores the first is chosen: the sort is stable."""
        logits = logits.float()
        if router.band:
            return mix_sparsely(logits, router)
        scores = scores_of(logits, router.scoring)
        ranked = scores if router.bias is None else scores + router.bias
        if router.top_groups < router.num_groups:
            groups = ranked.unflatten(-1, (router.num_groups, -1))
            best = groups.topk(router.group_best, dim=-1).values.sum(dim=-1)
            chosen = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
            keeps = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
            ranked = groups.masked_fill(~keeps[..., None], -torch.inf).flatten(1)
        experts = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : router.top_k]
        weights = scores.gather(1, experts)
        if router.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if router.expert_scales is not None:
            weights = weights * router.expert_scales[experts]
        return Routing(experts.to(torch.int32), weights * router.scale)

    def mix_experts(self, x: Array, routing: Routing, experts: Experts, adapters: AdapterUse | None = None) -> Array:
        if isinstance(experts.prepared, HostExperts):
            return experts.prepared.mix(x, routing, experts.site, adapters).to(x.dtype)
        (up, up_bias), (down, down_bias) = experts.prepared
        x = x.to(up.dtype)
        parts = x.new_zeros((*routing.experts.shape, down.shape[1]), dtype=torch.float32)  # [t, top_k, d]
        for number in torch.unique(routing.experts).tolist():
            tokens, choices = (routing.experts == number).nonzero(as_tuple=True)
            own = None if adapters is None else of_expert(adapters, tokens, experts.site, number)
            hidden = F.linear(x[tokens], up[number], None if up_bias is None else up_bias[number])
            hidden = hidden if own is None else adapted(hidden, x[tokens], UP, own)
            hidden = (self.act_mul if experts.gated else self.act)(hidden, experts.activation)
            y = F.linear(hidden, down[number], None if down_bias is None else down_bias[number])
            y = y if own is None else adapted(y, hidden, DOWN, own)
            parts = parts.index_put((tokens, choices), y.float())
        return (parts * routing.weights[..., None]).sum(dim=1).to(x.dtype)

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        return recur(x, recurrence, batch, storage)

    def scan(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        return scan(x, recurrence, batch, storage)

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        factors = coefficients.unflatten(-1, (-1, streams)).to(x.dtype)
        return torch.bmm(factors, x.unflatten(-1, (streams, -1))).flatten(1)

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        streams, y = x.unflatten(-1, (-1, y.shape[-1])), y.to(x.dtype)
        if isinstance(coefficients, tuple):  # numbers of the host, which a captured step may not copy to its device
            return torch.cat([streams[:, i] + factor * y for i, factor in enumerate(coefficients)], dim=-1)
        return (streams + coefficients.to(x.dtype).unsqueeze(-1) * y.unsqueeze(1)).flatten(1)

    def match_streams(self, x: Array, y: Array) -> Array:
        streams: torch.Tensor = torch.unflatten(y.float(), -1, (-1, x.shape[-1]))
        target = x.float().square().mean(dim=-1, keepdim=True).sqrt().unsqueeze(1)
        found = streams.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_MEAN_SQUARE)
        return (streams * target * found.rsqrt()).flatten(1).to(x.dtype)

    def logits(self, x: Array, head: Linear, softcap: float, batch: Batch | None = None) -> Array:
        y = self.linear(x, head).float()
        y = y if batch is None else adapted_logits(y, x, head.site, batch)
        return torch.tanh(y / softcap) * softcap if softcap else y

    # -- attention ------------------------------------------------------------------------------------------
    def _attend_segment(
        self, heads: Heads, shape: AttentionShape, segment: AttentionSegment, storage: Storage | None
    ) -> torch.Tensor:
        tokens = slice(segment.token_start, segment.token_end)
        own = Heads(*(None if part is None else part[tokens] for part in heads))
        own = own._replace(query=scale_by_position(own.query, shape, segment))
        attend = self._attend_decode if segment.phase is AttentionPhase.DECODE else self._attend_prefill
        return attend(own, shape, segment, storage)

    def _attend_prefill(
        self, own: Heads, shape: AttentionShape, segment: AttentionSegment, storage: Storage | None
    ) -> torch.Tensor:
        """Many queries of each sequence: over their own fresh keys and values, or over the cache behind a prefix."""
        is_fresh = segment.fresh and (storage is None or not storage.is_read_back)
        if storage is not None and segment.block_tables is not None and not is_fresh:
            return attend_cached(own.query, shape, segment, storage)
        return attend_fresh(own, shape, segment)

    def _attend_decode(
        self, own: Heads, shape: AttentionShape, segment: AttentionSegment, storage: Storage | None
    ) -> torch.Tensor:
        """The newest token of each sequence, and its drafts, over the cache."""
        if storage is None or segment.block_tables is None:
            raise PhaseError("decode reads the cache: pass a storage and block tables")
        return attend_cached(own.query, shape, segment, storage)


def _fuse(parts: tuple[Any, ...], biases: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenate the parts and their biases."""
    if len(parts) == 1:
        return parts[0], biases[0]
    if all(bias is None for bias in biases):
        return torch.cat(parts), None
    filled = [
        parts[i].new_zeros(parts[i].shape[0]) if bias is None else bias.to(parts[i].dtype)
        for i, bias in enumerate(biases)
    ]
    return torch.cat(parts), torch.cat(filled)
