"""OpenVINO's CPU plugin on a network of the same shape, in the form of exported models or with paged attention.

    openvino                  caches are states of one request; sequences have one length
    openvino[paged=true]      pages of 32 tokens, as in its serving pipeline
    openvino[precision=f32]   the precision of activations; by default the plugin chooses

Its weights are random and have formats of its own (`openvino_graph`), with the bits of those of the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.engines import Ask, Call, Done, Opening, Unsupported, greedy_only
from benchmarks.engines.openvino_graph import GraphBuilder, compile_model

PAGE_SIZE = 32  # tokens; the CPU plugin's
CHUNK = 512  # prompt tokens computed at once


class OpenVINO:
    """A compiled network and one request."""

    def __init__(self, opening: Opening) -> None:
        import openvino

        from bifolio.model.loader import load_model
        from bifolio.quant.formats import QuantFormat
        from bifolio.quant.tensor import QuantizedTensor

        model = load_model(str(opening.model))
        if model.config.architecture != "llama":
            raise Unsupported("the graph of OpenVINO is that of a Llama")
        part = model.weights.layers[0].down.parts[0]
        format = part.format if isinstance(part, QuantizedTensor) else QuantFormat.F16
        if format.is_quantized:
            format = QuantFormat.Q8_0 if format.bits_per_element > 6 else QuantFormat.Q4_0
        self._openvino, self.vocab_size = openvino, int(model.config.vocab_size)
        self._paged = bool(opening.options.get("paged"))
        graph = GraphBuilder(model.config, format).model(self._paged)
        if self._paged:
            from openvino._offline_transformations import paged_attention_transformation

            paged_attention_transformation(graph)
            graph.validate_nodes_and_infer_types()
        threads = opening.threads or os.cpu_count() or 1
        self._compiled = compile_model(graph, threads, opening.options.get("precision"))
        self._request = self._compiled.create_infer_request()
        self._pages_each = 0

    def reserve(self, sequences: int, length: int) -> None:
        """Pages for the largest call."""
        if not self._paged:
            return
        self._pages_each = -(-(length + 1) // PAGE_SIZE)
        for node in self._compiled.inputs:
            if "_cache." in node.get_any_name():
                count = sequences * self._pages_each
                shape = [extent.get_length() if extent.is_static else count for extent in node.get_partial_shape()]
                pages = self._openvino.Tensor(node.get_element_type(), shape)
                pages.data[...] = 0
                self._request.set_tensor(node, pages)

    def prepare(self, asks: Sequence[Ask]) -> Call:
        greedy_only(asks, "OpenVINO")
        if len({(len(ask.prompt), ask.max_tokens) for ask in asks}) > 1:
            raise Unsupported("OpenVINO is measured with batches of equal requests")
        if self._paged and not self._pages_each:
            self.reserve(len(asks), len(asks[0].prompt) + asks[0].max_tokens)
        prompts = np.array([ask.prompt for ask in asks], np.int64)
        return lambda: Done(self._answers(prompts, asks[0].max_tokens))

    def _answers(self, prompts: np.ndarray[Any, Any], new: int) -> list[list[int]]:
        if not self._paged:
            self._request.reset_state()
        length = prompts.shape[1]
        logits: Any = None
        for start in range(0, length, CHUNK):
            logits = self._run(prompts[:, start : start + CHUNK], start)
        outputs = [logits.argmax(-1).reshape(-1)]
        for step in range(1, new):
            logits = self._run(outputs[-1][:, None].astype(np.int64), length + step - 1)
            outputs.append(logits.argmax(-1).reshape(-1))
        found: list[list[int]] = np.stack(outputs, 1).tolist()
        return found

    def _run(self, ids: np.ndarray[Any, Any], context: int) -> Any:
        """Logits of the last tokens: ids i64[sequences, tokens] after `context` tokens of each sequence."""
        sequences, queries = ids.shape
        positions = np.tile(np.arange(context, context + queries, dtype=np.int64), (sequences, 1))
        if self._paged:
            self._request.infer(self._pages(ids, positions, context))
        else:
            mask = np.ones((sequences, context + queries), np.int64)
            beams = np.arange(sequences, dtype=np.int32)
            self._request.infer(
                {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "beam_idx": beams}
            )
        return self._request.get_output_tensor(0).data

    def _pages(self, ids: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], context: int) -> dict[str, Any]:
        sequences, queries = ids.shape
        used = -(-(context + queries) // PAGE_SIZE)
        first = self._pages_each * np.arange(sequences, dtype=np.int32)[:, None]
        return {
            "input_ids": ids.reshape(-1),
            "position_ids": positions.reshape(-1),
            "past_lens": np.full(sequences, context, np.int32),
            "subsequence_begins": np.arange(sequences + 1, dtype=np.int32) * np.int32(queries),
            "block_indices": (first + np.arange(used, dtype=np.int32)).reshape(-1),
            "block_indices_begins": np.arange(sequences + 1, dtype=np.int32) * np.int32(used),
            "max_context_len": np.array(context + queries, np.int32),
            "sampled_tokens_indices": np.arange(1, sequences + 1, dtype=np.int64) * queries - 1,
        }

    def about(self) -> dict[str, str]:
        return {"openvino": str(self._openvino.__version__)}

    def close(self) -> None:
        """The process ends."""
