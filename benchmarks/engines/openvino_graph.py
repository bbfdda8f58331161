"""A Llama with random weights as an OpenVINO graph.

The graph has the form of exported models: a stateful model whose caches are variables of the request, so that the
plugin inserts its own rotary, normalisation and attention kernels. Weights are compressed in formats that the plugin
reads directly: 16 bits, 8 bits with a scale per row, 4 bits with a scale per group.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor


class GraphBuilder:
    """The nodes of one network."""

    def __init__(self, config: ModelConfig, format: QuantFormat) -> None:
        import openvino
        from openvino import opset13

        self.openvino = openvino
        self.ops = opset13
        self.config = config
        self.format = format
        widths = (config.hidden_size, config.query_size, config.intermediate_size)
        self.int4_group = next(group for group in (128, 64, 32) if all(width % group == 0 for width in widths))
        self.rng = np.random.default_rng(0)
        self.state: list[Any] = []  # assignments of the caches

    def constant(self, values: Any, dtype: Any = np.float32) -> Any:
        return self.ops.constant(np.asarray(values, dtype))

    def ints(self, *values: int) -> Any:
        return self.constant(values, np.int64)

    def packed(self, data: np.ndarray[Any, Any], shape: list[int], kind: str) -> Any:
        """A constant of a type that numpy does not have, from its bytes."""
        element = getattr(self.openvino.Type, kind)
        return self.openvino.op.Constant(self.openvino.Tensor(data, shape, element), shared_memory=False)

    def weight(self, rows: int, columns: int) -> Any:
        """[rows, columns] of floats, decompressed from constants of the format."""
        ops = self.ops
        if not self.format.is_quantized:
            kind = "bf16" if self.format is QuantFormat.BF16 else "f16"
            pattern = self.rng.standard_normal((min(rows, 257), columns)).astype(np.float32) / np.float32(columns**0.5)
            stored = QuantizedTensor.quantize(pattern, self.format).data.view(np.uint16)
            data = np.resize(stored, (rows, columns))
            return ops.convert(self.packed(data, [rows, columns], kind), "f32")
        if self.format is QuantFormat.Q8_0:
            values = self.rng.integers(-127, 128, (rows, columns), dtype=np.int8)
            scales = np.full((rows, 1), 0.05 / 127, np.float16)
            return ops.convert(ops.multiply(ops.convert(ops.constant(values), "f16"), ops.constant(scales)), "f32")
        groups = columns // self.int4_group
        data = self.rng.integers(0, 256, rows * columns // 2, dtype=np.uint8)
        values = ops.convert(self.packed(data, [rows, groups, self.int4_group], "i4"), "f16")
        scaled = ops.multiply(values, ops.constant(np.full((rows, groups, 1), 0.05 / 8, np.float16)))
        return ops.convert(ops.reshape(scaled, self.ints(rows, columns), False), "f32")

    def linear(self, x: Any, rows: int, columns: int) -> Any:
        return self.ops.matmul(x, self.weight(rows, columns), False, True)

    def norm(self, x: Any) -> Any:
        ops, ones = self.ops, self.constant(np.ones((1, 1, self.config.hidden_size)))
        mean = ops.reduce_mean(ops.power(x, self.constant([[[2.0]]])), self.ints(-1), True)
        root = ops.sqrt(ops.add(mean, self.constant([[[self.config.norm_eps]]])))
        return ops.multiply(ops.multiply(x, ops.divide(self.constant([[[1.0]]]), root)), ones)

    def rotation(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines, [batch, 1, tokens, head_dim]."""
        ops, rope = self.ops, self.config.ropes[0]
        exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / rope.rotary_dim
        frequencies = self.constant((rope.theta**-exponents).reshape(1, 1, -1))
        angles = ops.multiply(ops.convert(ops.unsqueeze(positions, self.ints(-1)), "f32"), frequencies)
        both = ops.unsqueeze(ops.concat([angles, angles], -1), self.ints(1))
        return ops.cos(both), ops.sin(both)

    def rotate(self, x: Any, rotation: tuple[Any, Any]) -> Any:
        ops, half = self.ops, self.config.head_dim // 2
        axis, one = self.ints(3), self.ints(1)
        first = ops.slice(x, self.ints(0), self.ints(half), one, axis)
        second = ops.slice(x, self.ints(half), self.ints(np.iinfo(np.int64).max), one, axis)
        turned = ops.concat([ops.multiply(second, self.constant([[[[-1.0]]]])), first], -1)
        return ops.add(ops.multiply(x, rotation[0]), ops.multiply(turned, rotation[1]))

    def heads(self, x: Any, count: int) -> Any:
        """[batch, heads, tokens, head_dim]"""
        split = self.ops.reshape(x, self.ints(0, 0, count, self.config.head_dim), True)
        return self.ops.transpose(split, self.ints(0, 2, 1, 3))

    def cached(self, x: Any, name: str, batch: Any, beams: Any) -> Any:
        """Append to the cache variable of every sequence and return the whole cache."""
        ops, kv_heads, size = self.ops, self.config.num_kv_heads, self.config.head_dim
        shape = self.openvino.PartialShape([-1, kv_heads, -1, size])
        empty = ops.broadcast(
            self.constant(0.0), ops.concat([batch, self.ints(kv_heads), self.ints(0), self.ints(size)], 0)
        )
        past = ops.read_value(empty, name, self.openvino.Type.f32, shape)
        full = ops.concat([ops.gather(past, beams, self.constant(0, np.int64)), x], 2)
        self.state.append(ops.assign(full, name))
        return full

    def repeated(self, x: Any) -> Any:
        """Repeat each key or value head for the query heads that share it."""
        ops, config = self.ops, self.config
        shared = config.num_heads // config.num_kv_heads
        if shared == 1:
            return x
        target = ops.concat([self.ints(1), self.ints(1), self.ints(shared), self.ints(1), self.ints(1)], 0)
        wide = ops.broadcast(ops.unsqueeze(x, self.ints(2)), target, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, self.ints(0, config.num_heads, -1, config.head_dim), True)

    def mask(self, attention_mask: Any, positions: Any) -> Any:
        """Attention mask, 0 for visible positions and minus infinity for others: [batch, 1, tokens, context]."""
        ops = self.ops
        shape = ops.shape_of(attention_mask, "i64")
        length = ops.gather(shape, self.constant(1, np.int64), self.constant(0, np.int64))
        keys = ops.range(self.constant(0, np.int64), length, self.constant(1, np.int64), "i64")
        keys = ops.unsqueeze(keys, self.ints(0, 1, 2))
        queries = ops.unsqueeze(ops.unsqueeze(positions, self.ints(1)), self.ints(3))
        present = ops.unsqueeze(ops.convert(attention_mask, "boolean"), self.ints(1, 2))
        allowed = ops.logical_and(ops.less_equal(keys, queries), present)
        return ops.select(allowed, self.constant(0.0), self.constant(np.finfo(np.float32).min))

    def model(self, paged: bool = False) -> Any:
        ops, config = self.ops, self.config
        d, ffn = config.hidden_size, config.intermediate_size
        ids = self.parameter("input_ids", [-1, -1], "i64")
        attention_mask = self.parameter("attention_mask", [-1, -1], "i64")
        positions = self.parameter("position_ids", [-1, -1], "i64")
        beams = self.parameter("beam_idx", [-1], "i32")
        table = self.weight(config.vocab_size, d)
        x = ops.gather(table, ids, self.constant(0, np.int64))
        batch = ops.gather(ops.shape_of(ids, "i64"), self.ints(0), self.constant(0, np.int64))
        rotation, mask = self.rotation(positions), self.mask(attention_mask, positions)
        for i in range(config.num_layers):
            h = self.norm(x)
            q = self.heads(self.linear(h, config.query_size, d), config.num_heads)
            k = self.heads(self.linear(h, config.kv_size, d), config.num_kv_heads)
            v = self.heads(self.linear(h, config.kv_size, d), config.num_kv_heads)
            keys = self.cached(self.rotate(k, rotation), f"key.{i}", batch, beams)
            values = self.cached(v, f"value.{i}", batch, beams)
            attended = ops.scaled_dot_product_attention(
                self.rotate(q, rotation), self.repeated(keys), self.repeated(values), mask
            )
            joined = ops.reshape(ops.transpose(attended, self.ints(0, 2, 1, 3)), self.ints(0, 0, -1), True)
            x = ops.add(x, self.linear(joined, d, config.query_size))
            h = self.norm(x)
            gate = ops.swish(self.linear(h, ffn, d))
            up = ops.multiply(gate, self.linear(h, ffn, d))
            x = ops.add(x, self.linear(up, d, ffn))
        inputs = [ids, attention_mask, positions, beams]
        if paged:  # paged attention expects tokens in the batch dimension
            inputs.append(self.parameter("sampled_tokens_indices", [-1], "i64"))
            last = ops.gather(self.norm(x), inputs[-1], self.constant(0, np.int64))
        else:
            end = self.ints(np.iinfo(np.int64).max)
            last = ops.slice(self.norm(x), self.ints(-1), end, self.ints(1), self.ints(1))
        logits = ops.result(self.linear(last, config.vocab_size, d), name="logits")
        return self.openvino.Model([logits], self.state, inputs, "llama")

    def parameter(self, name: str, shape: list[int], kind: str) -> Any:
        node = self.ops.parameter(self.openvino.PartialShape(shape), getattr(self.openvino.Type, kind), name=name)
        node.output(0).get_tensor().set_names({name})
        return node


def compile_model(model: Any, threads: int, precision: str | None) -> Any:
    """Compile with the plugin's defaults for low latency; by default it chooses the precision of activations."""
    import openvino

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if precision:
        options["INFERENCE_PRECISION_HINT"] = precision
    return openvino.Core().compile_model(model, "CPU", options)
