"""GGUF files in several parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from bifolio.model.gguf.reader import open_gguf


def split(path: Path, count: int, *, total: int | None = None) -> list[Path]:
    """The parts of a file, made by the gguf package with the keys of llama.cpp's splitter."""
    source = open_gguf(path)
    names = list(source.entries)
    paths = []
    for number in range(count):
        paths.append(path.with_name(f"part-{number + 1:05d}-of-{count:05d}.gguf"))
        writer = gguf.GGUFWriter(paths[-1], "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total or len(names))
        if number == 0:
            for key, value in source.metadata.items():
                if key.startswith("llama."):
                    writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)  # type: ignore[arg-type]
        for name in names[number::count]:
            tensor = source.tensor(name)
            kind = gguf.GGMLQuantizationType(tensor.format.ggml_type)
            data = tensor.data if tensor.format.is_quantized else tensor.dequantize()
            raw = {"raw_shape": data.shape, "raw_dtype": kind} if tensor.format.is_quantized else {}
            writer.add_tensor(name, np.array(data), **raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
