"""The kernel set for GPUs: cuBLAS through torch for many rows, Triton kernels for all other operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton

from bifolio.errors import ConfigError
from bifolio.kernels.cuda.row_attention import RawHeads
from bifolio.kernels.host_experts import HostExperts
from bifolio.kernels.interface import (
    Adapter,
    AdapterUse,
    Array,
    AttentionPhase,
    AttentionShape,
    Batch,
    DeviceSlots,
    Experts,
    HeadLinear,
    Heads,
    Linear,
    Network,
    Norm,
    Recurrence,
    Rotation,
    RoutedExperts,
    Router,
    Routing,
    Segments,
    SharedMlp,
    SlotSizes,
    StepProgram,
    Storage,
    XieluCoefficients,
)
from bifolio.kernels.recurrence import states_of
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.kernels.torch_adapters import adapted_logits
from bifolio.kernels.torch_arrays import TorchArrays
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import cache, norm, quantised
from bifolio.kernels.triton import experts as moe
from bifolio.kernels.triton.adapted_products import adapted
from bifolio.kernels.triton.adapter_slots import OF_EXPERTS
from bifolio.kernels.triton.attention import Attention
from bifolio.kernels.triton.cache import CudaStorage
from bifolio.kernels.triton.choice import TritonChoice
from bifolio.kernels.triton.entries import TensorEntries
from bifolio.kernels.triton.expert_choice import can_route, route
from bifolio.kernels.triton.expert_stream import ExpertStream
from bifolio.kernels.triton.graphs.captured_function import CapturedFunction
from bifolio.kernels.triton.graphs.graph_cache import GraphCache
from bifolio.kernels.triton.head_products import head_products
from bifolio.kernels.triton.lazy_fusion import Mixture, Normed, Product, Sum, tensor
from bifolio.kernels.triton.lookup import embed_rows, look_up_rotation
from bifolio.kernels.triton.products import Products
from bifolio.kernels.triton.recurrence import recur
from bifolio.kernels.triton.row_layouts import QuantisedWeight
from bifolio.kernels.triton.scan_plan import StagedStates
from bifolio.kernels.triton.selective import scan_channels
from bifolio.kernels.triton.shared_expert import fold_shared
from bifolio.kernels.triton.slots import TritonSlots
from bifolio.kernels.triton.step.texts import TextSteps
from bifolio.kernels.triton.towers import TowerKernels
from bifolio.long_rope import LONG_ROPE
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

INTERPRETED_PROCESSORS = 2  # multiprocessors assumed in Triton's interpreter


class TritonKernels(TensorEntries, TorchArrays, TritonChoice):
    """Dense weights in bf16 by default. Without a GPU it runs in Triton's interpreter, for tests.

    The torch set that it holds prepares dense weights and multiplies many rows.
    """

    name = "triton"
    formats: frozenset[QuantFormat] = quantised.FORMATS
    launches_ahead = True
    stores_fp8 = True

    def __init__(self, device: str = "cuda", dtype: str = "bf16", *, deterministic: bool = False) -> None:
        super().__init__(device, dtype)
        if not device.startswith("cuda") and not triton.knobs.runtime.interpret:
            raise ConfigError(f"Triton kernels cannot run on {device!r}: use cuda, or set TRITON_INTERPRET=1 for tests")
        self.deterministic = deterministic
        self.num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.startswith("cuda")
            else INTERPRETED_PROCESSORS
        )
        self._torch, self._towers = TorchKernels(device, dtype), TowerKernels(device, dtype)
        self._weights = quantised.PackedWeights(self._torch)
        self._products = Products(
            self._weights, self.dtype, deterministic=deterministic,
            num_processors=self.num_processors if device.startswith("cuda") else 0,
        )  # fmt: skip
        self._rotations: dict[tuple[int, float], torch.Tensor] = {}  # f32[sets, positions, 2, half]
        self._tabulated: list[torch.Tensor] = []
        self._states: StagedStates | None = None  # of the running pass
        self._expert_stream: ExpertStream | None = None  # of experts on the host
        self._captured: GraphCache | None = None  # of captured functions
        self.attention = Attention(device, self.dtype, self.num_processors, deterministic=deterministic)

    # -- arrays and whole steps ---------------------------------------------------------------------------------------
    def build_facts(self) -> dict[str, str]:
        return {**super().build_facts(), "triton": str(triton.__version__)}

    def to_host(self, array: Array) -> np.ndarray:
        return super().to_host(tensor(array))

    def join_columns(self, parts: Sequence[tuple[Array, int, int]], factors: Array | None = None) -> Array:
        return super().join_columns([(tensor(x), start, stop) for x, start, stop in parts], factors)

    def with_rows(self, x: Array, parts: Sequence[tuple[np.ndarray, Array]]) -> Array:
        return super().with_rows(tensor(x), parts)

    @property
    def for_towers(self) -> TowerKernels:
        return self._towers

    def take(self, x: Array, rows: Array) -> Array:
        return super().take(tensor(x), rows)

    def sum_rows(self, x: Array, starts: Array) -> Array:
        return super().sum_rows(tensor(x), starts)

    def tap(self, x: Array, column: int, batch: Batch) -> None:
        if batch.taps is not None:
            super().tap(tensor(x), column, batch)

    def new_storage(self, layout: CacheLayout) -> KVStorage:
        return CudaStorage(layout, device=self.device, backend="torch", arena=self.arena)

    def record(self, network: Network, phase: AttentionPhase) -> StepProgram | None:
        """Steps of texts; None: steps with a cache are captured with their slots (`device_slots`)."""
        is_encoder = bool(network.shapes) and all(shape.bidirectional for shape in network.shapes)
        if not is_encoder or network.split is None or (self.ranks is not None and self.ranks.size > 1):
            return None
        return TextSteps(self, network, network.split)

    def capture(self, run: Callable[[Array], Array], x: Array) -> Callable[[Array], Array] | None:
        self._captured = self._captured or GraphCache(self.device)
        return CapturedFunction(self._captured, run, tensor(x))

    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> DeviceSlots | None:
        if self.ranks is not None and self.ranks.size > 1:
            return None  # rank 0 alone has slots: the steps of all ranks are launched one by one
        if self.has_host_experts and self.host_turn is None:
            return None  # a captured step cannot wait for kernels in Python
        if any(shape.has_entries for shape in network.shapes):
            return None  # the host finds entries
        if self.host_turn is not None:
            self.host_turn.most = max(self.host_turn.most, sizes.num_slots)
        self.tabulate(network.rotations, sizes.max_model_len)
        return TritonSlots(self, network, storage, sizes)

    # -- weights ------------------------------------------------------------------------------------------------------
    def prepare_linear(self, linear: Linear) -> Linear:
        return self._weights.prepare_linear(linear)

    def prepare_experts(self, experts: Experts) -> Experts:
        """`prepared` is (stack of gate and up, of down)."""
        if experts.host is not None:
            prepared = HostExperts.prepared(experts, self)
            if self.host_turn is not None and self.is_cuda and not self.deterministic:
                rate = self.host_turn.calls.product_rate
                self._expert_stream = self._expert_stream or ExpertStream(self.device, rate)
                self._expert_stream.add(experts)
            return prepared
        return replace(experts, prepared=moe.prepare_stacks(experts, self._torch))

    def fold_shared(self, routed: RoutedExperts, shared: SharedMlp) -> RoutedExperts | None:
        return fold_shared(routed, shared) if can_route(routed.choice, len(routed.experts.up)) else None

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear:
        return self._torch.prepare_head_linear(linear)

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        return self._weights.prepare_embedding(table)

    def prepare_norm(self, norm: Norm) -> Norm:
        """Store weights that are exact in the set's dtype in that dtype: with few rows every program reads them."""
        prepared = self._torch.prepare_norm(norm)
        narrow = prepared.weight.to(self.dtype)
        return replace(prepared, weight=narrow) if torch.equal(narrow.float(), prepared.weight) else prepared

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence:
        return self._torch.prepare_recurrence(recurrence)

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        if adapter.experts:
            raise ConfigError(OF_EXPERTS)
        return self._torch.prepare_adapter(adapter)

    # -- the network ------------------------------------------------------------------------------------------------
    def tabulate(self, rotations: Sequence[tuple[Array, float]], max_position: int) -> None:
        """Tabulate cosine and sine for all positions below `max_position`, for lookups in CUDA graphs."""
        positions = torch.arange(max_position, device=self.device)
        for frequencies, scale in rotations:
            sets = range(frequencies.shape[0] if frequencies.ndim == 2 else 1)
            tables = [self._torch.rotation(frequencies, scale, positions + LONG_ROPE * number) for number in sets]
            table = torch.stack([torch.stack(tuple(rotation), dim=1) for rotation in tables])
            self._rotations[frequencies.data_ptr(), scale] = table
            self._tabulated.append(frequencies)  # keeps the address from being reused

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        table = self._rotations.get((inverse_frequencies.data_ptr(), scale))
        if table is None:
            return self._torch.rotation(inverse_frequencies, scale, positions)
        return Rotation(*look_up_rotation(table, positions))

    def embed(self, table: Any, ids: Array, scale: float, *, is_partial: bool = False) -> Array:
        """Embeddings in f32: the residual stream is not rounded between layers."""
        self._products.begins_pass = True
        ids = torch.where(ids < table.shape[0], ids, 0) if is_partial else ids
        if isinstance(table, QuantisedWeight):
            return quantised.dequantise(table, torch.float32, rows=ids, factor=scale)
        return embed_rows(table, ids, scale)

    def norm(self, x: Array, norm: Norm) -> Array:
        size = norm.weight.shape[0]
        if isinstance(x, Sum) and x.value is None and x.x.shape[-1] == size:
            x.value, normed = self._norm_rows(x.x, norm, x.delta)
            return normed
        values = tensor(x)
        if values.shape[-1] != size:
            return self._plain_norm(values.reshape(-1, size), norm).reshape(values.shape)
        if self._fuses_norm(values, norm):
            return Normed(values, norm, self._plain_norm)
        return self._plain_norm(values, norm)

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        if scale != 1.0:
            return self._torch.add(tensor(x), tensor(y), scale)
        if isinstance(x, Mixture) and x.value is None and isinstance(y, torch.Tensor):
            return x.compute(y)
        x = tensor(x)
        if isinstance(y, Product) and y.value is None:
            return y.compute(y, None, x)
        if isinstance(y, Mixture) and y.value is None:
            return y.compute(x)
        return Sum(x, tensor(y))

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        total = self.add(x, delta)
        normed = self.norm(total, norm)
        return tensor(total), normed

    def linear(self, x: Array, linear: Linear) -> Array:
        if not isinstance(x, Normed):
            x = tensor(x).to(self.dtype)  # the residual stream is f32
        return self._products.linear(x, linear)

    def adapt_embedding(self, x: Array, ids: Array, scale: float, adapters: AdapterUse) -> Array:
        """Staged adapters change no embedding (`engine.adapters`)."""
        return self._torch.adapt_embedding(tensor(x), ids, scale, adapters) if adapters.staged is None else x

    def adapt(self, y: Array, x: Array, site: int, adapters: AdapterUse) -> Array:
        if adapters.staged is None:
            return self._torch.adapt(tensor(y), tensor(x), site, adapters)
        plan = adapters.staged.plans.get(site)
        return y if plan is None else adapted(y, x, plan, adapters.staged.grouped, self._products)

    def exchanged(self, x: Array) -> Array:
        """Products stay f32, as those that are added to the residual stream without an exchange."""
        is_new = isinstance(x, Product) and x.value is None and not x.is_adapted
        return self._products.exact(x.x, x.linear) if is_new else tensor(x)

    def act_mul(self, x: Array, activation: str, cutoff: float | None = None) -> Array:
        if cutoff is not None:
            return self._torch.act_mul(tensor(x), activation, cutoff)
        if isinstance(x, Product) and x.value is None:
            return x.compute(x, activation, None)
        return norm.act_mul(tensor(x), activation)

    def act(self, x: Array, activation: str) -> Array:
        return self._torch.act(tensor(x), activation)

    def clamp(self, x: Array, least: Array, most: Array) -> Array:
        return self._torch.clamp(tensor(x), least, most)

    def xielu(self, x: Array, coefficients: XieluCoefficients) -> Array:
        return self._torch.xielu(tensor(x), coefficients)

    def weigh(self, x: Array, routing: Routing) -> Array:
        return self._torch.weigh(tensor(x), routing)

    def gate(self, x: Array, logits: Array) -> Array:
        return norm.gate(tensor(x), tensor(logits))

    def route(self, logits: Array, router: Router) -> Routing:
        values = tensor(logits)
        return route(values, router) if can_route(router, values.shape[1]) else self._torch.route(values, router)

    def mix_experts(self, x: Array, routing: Routing, experts: Experts, adapters: AdapterUse | None = None) -> Array:
        if isinstance(experts.prepared, HostExperts):
            stacks = self._copied_stacks(experts, routing, adapters)
            if stacks is None:
                return experts.prepared.mix(tensor(x), routing, experts.site, adapters)
            experts = replace(experts, prepared=stacks)
        if adapters is not None and adapters.changes_experts(experts.site):
            raise ConfigError(OF_EXPERTS)
        is_deferred = isinstance(x, Normed) and x.value is None
        values, norm = (x.x, x.norm) if is_deferred else (tensor(x).to(self.dtype), None)

        def compute(residual: torch.Tensor | None) -> torch.Tensor:
            return moe.mixed(
                values, routing, experts, self.dtype, norm=norm, residual=residual, fixed=self.deterministic,
                num_processors=self.num_processors if self.device.startswith("cuda") else 0,
            )  # fmt: skip

        return Mixture(compute, len(values))

    def _copied_stacks(self, experts: Experts, routing: Routing, adapters: AdapterUse | None) -> tuple[Any, Any] | None:
        """A layer's experts, copied to the device where it multiplies these rows earlier; None: the host computes."""
        stream, (rows, choices) = self._expert_stream, routing.experts.shape
        layer = None if stream is None or rows <= self.host_turn.most else stream.layer(experts)
        if stream is None or layer is None or torch.cuda.is_current_stream_capturing():
            return None
        if adapters is not None and adapters.changes_experts(experts.site):
            return None
        if (
            not stream.reserve()
            or self.host_turn.room.is_idle
            or not stream.is_faster(rows, choices, layer, self.host_turn.row_seconds)
        ):
            return None
        return stream.stacks(layer)

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        return recur(tensor(x), recurrence, self._staged_states(batch), storage)

    def scan(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        return scan_channels(tensor(x), recurrence, self._staged_states(batch), storage)

    def _staged_states(self, batch: Batch) -> StagedStates:
        if self._states is None or batch.states is None or self._states.use is not batch.states:
            self._states = StagedStates.of(states_of(batch), self.device, chunked=not self.deterministic)
        return self._states

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        return self._torch.mix_streams(tensor(x), tensor(coefficients), streams)

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        factors = coefficients if isinstance(coefficients, tuple) else tensor(coefficients)
        return self._torch.add_to_streams(tensor(x), tensor(y), factors)

    def match_streams(self, x: Array, y: Array) -> Array:
        return self._torch.match_streams(tensor(x), tensor(y))

    def logits(self, x: Array, head: Linear, softcap: float, batch: Batch | None = None) -> Array:
        """Staged adapters change no head (`engine.adapters`)."""
        y = self._products.exact(x, head)
        if batch is not None and batch.adapters is not None and batch.adapters.staged is None:
            y = adapted_logits(y, tensor(x), head.site, batch)
        return torch.tanh(y / softcap) * softcap if softcap else y

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        own = tensor(x).to(self.dtype)  # the residual stream is f32
        if self.deterministic and linear.prepared is not None and len(own):
            return head_products(own, linear.prepared, start)
        return self._torch.head_linear(own, linear, start)

    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        return self._torch.join_latent(tensor(query), tensor(absorbed), tensor(latent), norm, rope)

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        if self.attention.turns_heads(shape, rotation, batch.segments, storage):
            return Heads(RawHeads(tensor(qkv), rotation), None, None)
        own = None if shape.bidirectional else storage  # whole texts read their own keys and values alone
        return cache.rope_and_write(tensor(qkv), shape, rotation, batch.cache_index, own, self.dtype)

    # -- attention ----------------------------------------------------------------------------------------------------
    def attend(self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None) -> Array:
        return self.attention.attend(heads, shape, segments, storage)

    def stage_states(self, states: StagedStates) -> None:
        """The states of the next pass; kept by the caller, since a CUDA graph reuses them."""
        self._states = states

    # -- details ------------------------------------------------------------------------------------------------------
    def _fuses_norm(self, x: torch.Tensor, norm: Norm) -> bool:
        """Whether the following product computes the norm: for one row and a plain RMS norm."""
        return x.dim() == 2 and x.shape[0] == 1 and not norm.centered and norm.bias is None and not self.deterministic

    def _plain_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._norm_rows(x, norm)[1]

    def _norm_rows(
        self, x: torch.Tensor, weights: Norm, delta: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.norm_rows(x, weights, delta, out_dtype=self.dtype)
