"""`bifolio inspect`: the contents of a model file, and the memory that running it takes."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, options

if TYPE_CHECKING:
    from bifolio.config import ModelConfig
    from bifolio.model.gguf.reader import Value
    from bifolio.model.vision.tower import Vision

HELP = """Show a model's architecture, metadata, tensors, formats, sizes and memory plan.

The plan is made from the file's header: nothing is allocated, and a model that does not fit can be looked at.

With --diff, show the differences of two GGUF models; the exit status is 0 if there are none, and 1 if there are."""
EPILOG = """Examples:

  bifolio inspect smol.q4_0.gguf

  bifolio inspect ./model --memory 4GB --max-model-len 4096 --no-tensors

  bifolio inspect smol.q4_k_m.gguf --quant

  bifolio inspect --diff smol.q8_0.gguf smol.q4_k_m.gguf

  bifolio inspect ./model --json | jq .formats"""
RECURRENT_KINDS = {
    "conv": "gated convolutions",
    "delta": "gated delta rule",
    "keyed": "gated delta rule with a decay for each key channel",
    "lightning": "lightning attention",
    "lru": "linear recurrent units",
    "mamba": "Mamba-2",
    "rwkv": "RWKV-7",
    "selective": "Mamba",
}
_SHOWN_ITEMS = 6  # of a long array
MAX_DEFAULT_LEN = 8192  # tokens; the default of `LLM`


def register(app: commands.App) -> None:
    app.command("inspect", help=HELP, epilog=EPILOG)(inspect)


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a model file."""

    path: str
    kind: str
    metadata: dict[str, Any]
    tensors: list[TensorLine]

    def by_format(self) -> dict[str, dict[str, int]]:
        """Tensors, values and bytes of each format."""
        groups: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "values": 0, "bytes": 0})
        for tensor in self.tensors:
            values = 1
            for size in tensor.shape:
                values *= size
            group = groups[tensor.format]
            group["tensors"] += 1
            group["values"] += values
            group["bytes"] += tensor.nbytes
        return dict(groups)


def inspect(
    model: Annotated[str, commands.argument(help="A .gguf file, a folder, a llama2.c .bin file or a model's name.")],
    other: Annotated[str | None, commands.argument(help="The second model of --diff, a .gguf file or a name.")] = None,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
    tensors: Annotated[bool, commands.option(help="List every tensor.")] = True,
    quant: Annotated[
        bool, commands.option("--quant", help="Show the formats alone, and the form that each takes in memory.")
    ] = False,
    diff: Annotated[
        bool, commands.option("--diff", help="Differences of two GGUF models: metadata, tensors, bytes and values.")
    ] = False,
    tolerance: Annotated[
        float,
        commands.option("--tolerance", min=0, help="Largest absolute difference of values that --diff ignores."),
    ] = 0.0,
    memory: options.Memory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 16,
    block_size: options.BlockSize = 16,
    kv_dtype: options.KvDtype = "auto",
) -> None:
    from bifolio.model.loader import resolve

    path = resolve(model)
    if diff != (other is not None):
        raise commands.BadParameter("--diff compares two models: bifolio inspect --diff A.gguf B.gguf")
    if other is not None:
        from bifolio.cli.inspect_diff import show_difference

        show_difference(path, resolve(other), tolerance, as_json)
        return
    contents = read_contents(path)
    if quant:
        show_formats(contents, as_json)
        return
    plan = memory_plan(
        path, memory=memory, max_model_len=max_model_len, max_num_seqs=max_num_seqs, block_size=block_size,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    if as_json:
        record = {
            **asdict(contents),
            "formats": contents.by_format(),
            "total_bytes": sum(tensor.nbytes for tensor in contents.tensors),
            "memory_plan": plan,
        }
        commands.echo(json.dumps(record, ensure_ascii=False, default=str))
    else:
        show(contents, plan, tensors)


def show_formats(contents: Contents, as_json: bool) -> None:
    from bifolio.cli.inspect_quant import quant_rows, show_quant

    rows = quant_rows(contents.tensors)
    if as_json:
        commands.echo(json.dumps({"path": contents.path, "formats": rows}))
    else:
        show_quant(contents.path, rows)


def read_contents(path: Path) -> Contents:
    """A GGUF file is read by its header alone, so that files of any architecture can be looked at."""
    if path.is_dir():
        from bifolio.model.huggingface.hf_loader import folder_tensors, read_json

        lines = [TensorLine(*tensor) for tensor in sorted(folder_tensors(path).stored())]
        return Contents(str(path), "folder", read_json(path / "config.json"), lines)
    if path.suffix.lower() == ".gguf":
        from bifolio.model.gguf.split import open_whole_gguf

        file = open_whole_gguf(path)
        metadata = {key: plain_value(value) for key, value in file.metadata.items()}
        lines = [TensorLine(e.name, e.shape, e.format.name, e.nbytes) for e in file.entries.values()]
        return Contents(str(path), f"GGUF version {file.version}", metadata, lines)
    from bifolio.model.loader import open_model

    opened = open_model(path)
    lines = [TensorLine(view.name, view.shape, view.format.name, view.nbytes) for view in opened.views()]
    return Contents(str(path), "llama2.c", asdict(opened.text.config), lines)


def plain_value(value: Value) -> Any:
    """A value as JSON; long arrays are shortened."""
    if isinstance(value, int | float | bool | str):
        return value
    items = [
        item.item() if hasattr(item, "item") else item for _, item in zip(range(_SHOWN_ITEMS), value, strict=False)
    ]
    return items if len(value) <= _SHOWN_ITEMS else {"length": len(value), "first": items}


def memory_plan(
    path: Path,
    *,
    memory: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    block_size: int = 16,
    kv_dtype: str = "auto",
) -> dict[str, Any]:
    """Bytes of weights and cache if the model were run on the CPU with these settings; the reason, when it cannot be.

    Bytes of weights follow from the formats and shapes of the file's tensors, and the formats that the kernels take.
    """
    from bifolio.config import CacheConfig, EngineConfig, KVDtype, checked_kv_dtype
    from bifolio.engine.host_memory import total_memory
    from bifolio.engine.memory import parse_bytes, plan_memory, show_bytes
    from bifolio.engine.state_plan import plan_states
    from bifolio.errors import BifolioError
    from bifolio.kernels.cpu import CPU_FORMATS, CPU_KERNELS
    from bifolio.model.loader import open_model
    from bifolio.quant.convert import conversion_notes, converted_bytes

    try:
        opened = open_model(path)
        config = opened.text.config
        matrices = [view for view in opened.views() if len(view.shape) >= 2]
        length = min(max_model_len or MAX_DEFAULT_LEN, config.max_position)
        dtype: KVDtype = "f32" if kv_dtype == "auto" else checked_kv_dtype(kv_dtype)
        cache = CacheConfig(sys.maxsize, block_size, dtype)
        plan = plan_memory(
            config,
            sum(converted_bytes(matrix, CPU_FORMATS) for matrix in matrices),
            block_size=block_size,
            kv_dtype=dtype,
            states=plan_states(config, EngineConfig(cache, length, max_num_seqs, max(max_num_seqs, 512))),
            memory=None if memory is None else parse_bytes(memory),
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            total_bytes=total_memory(),
        )
    except BifolioError as error:
        return {"error": str(error)}
    needed = plan.weight_bytes + plan.cache_bytes
    short = [f"does not fit     weights and cache take {show_bytes(needed)}, more than the free memory"]
    return {
        **asdict(plan),
        "cache_bytes": plan.cache_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "num_states": plan.num_states,
        "state_bytes": plan.state_bytes,
        "max_model_len": length,
        "num_full_sequences": plan.max_cached_tokens // length,
        "num_parameters": config.num_parameters,
        "num_active_parameters": config.num_active_parameters,
        "architecture": [*architecture_lines(config), *image_lines(opened.text.vision)],
        "notes": conversion_notes([m.format for m in matrices], CPU_FORMATS, CPU_KERNELS),
        "lines": [
            *plan.lines(),
            f"fits             {plan.max_cached_tokens // length} sequences of {length} tokens",
            *(short if needed > plan.free_bytes else []),
        ],
    }


def image_lines(vision: Vision | None) -> list[str]:
    """The tower in words."""
    if vision is None:
        return []
    sizes = vision.sizes
    layers = f"{sizes.num_layers} layers of {sizes.hidden_size}, patches of {sizes.patch_size} x {sizes.patch_size}"
    return [f"images: tower {vision.name}, {layers}"]


def architecture_lines(config: ModelConfig) -> list[str]:
    """The network in words."""
    windows = sorted({layer.window for layer in config.layers if layer.window is not None})
    sliding = f", sliding window {', '.join(map(str, windows))}" if windows else ""
    mlp_sizes = " or ".join(map(str, sorted({config.mlp_size(layer) for layer in range(config.num_layers)})))
    return [
        f"{config.architecture}, {config.num_parameters:,} parameters, context {config.max_position}",
        f"{config.num_layers} layers of {config.hidden_size}, MLP {mlp_sizes} ({config.activation})",
        *expert_lines(config),
        attention_line(config) + sliding,
        *recurrent_lines(config),
        *stream_lines(config),
        f"vocabulary {config.vocab_size}, {'tied' if config.tie_embeddings else 'separate'} output matrix",
    ]


def expert_lines(config: ModelConfig) -> list[str]:
    """The experts of a network, and the parameters that one token is multiplied with."""
    moe = config.moe
    if moe is None:
        return []
    shared = f", one shared MLP of {moe.shared_size}" if moe.shared_size else ""
    dense = sum(layer.dense for layer in config.layers)
    plain = f"; plain MLPs in {dense} layers" if dense else ""
    return [
        f"{moe.num_experts} experts of {moe.expert_size} in a layer, {moe.top_k} for a token{shared}{plain}",
        f"{config.num_active_parameters:,} parameters active for a token",
    ]


def attention_line(config: ModelConfig) -> str:
    sinks = ", attention sinks" if config.sinks else ""
    if config.compressed is not None:
        return f"{config.num_heads} heads of {config.head_dim} over one head of keys{entries_of(config)}{sinks}"
    if config.mla is None:
        kinds = sorted({(config.head_size(layer), config.kv_heads(layer)) for layer in config.attention_layers})
        heads = " or ".join(f"{config.num_heads} heads of {size}, {count} for keys and values" for size, count in kinds)
        shared = len(config.attention_layers) - len(config.cached_layers)
        reused = f"; {shared} layers read the keys and values of others" if shared and not config.bidirectional else ""
        return f"{heads}{reused}{', in both directions' if config.bidirectional else ''}{sinks}"
    size = config.mla.nope_size + config.mla.rope_size
    cached = f"{config.mla.latent_size} + {config.mla.rope_size}"
    chosen = f", {config.mla.index_top_k} positions chosen by an indexer" if config.mla.index_top_k else ""
    return f"{config.num_heads} heads of {size} over one cached latent of {cached}{chosen}{sinks}"


def entries_of(config: ModelConfig) -> str:
    """The compressed entries that layers attend to."""
    kinds = sorted({(layer.entry_tokens, layer.chooses_entries) for layer in config.layers if layer.entry_tokens})
    chosen = f" ({config.compressed.index_top_k} of them chosen)" if config.compressed is not None else ""
    return "".join(f", entries of {tokens} tokens{chosen if chooses else ''}" for tokens, chooses in kinds)


def stream_lines(config: ModelConfig) -> list[str]:
    """Parallel residual streams, and inputs of layers beside them."""
    lines = []
    if config.layer_inputs is not None:
        lines.append(f"an input of {config.layer_inputs.size} for each token and layer")
    if config.streams is not None:
        lines.append(f"{config.streams.count} parallel residual streams")
    if config.hyper is not None:
        lines.append(f"{config.hyper.count} residual streams, mixed by the token")
    if config.shared_blocks is not None:
        lines.append(f"{config.shared_blocks.count} blocks of attention and an MLP that layers share")
    return lines


def recurrent_lines(config: ModelConfig) -> list[str]:
    """The recurrent layers of a hybrid network."""
    own = config.recurrent
    if own is None:
        return []
    kind = RECURRENT_KINDS[own.kind]
    size = f", {own.heads} heads with states of {own.key_size} x {own.value_size}" if own.heads else ""
    size = f", states of {own.key_size} for each channel" if own.by_channel else size
    return [
        f"attention in {len(config.attention_layers)} layers, {kind} in {len(config.recurrent_layers)}{size}"
        + (f", convolutions of {own.channels} channels over {own.width} tokens" if own.width > 1 else "")
    ]


def show(contents: Contents, plan: dict[str, Any], with_tensors: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from bifolio.engine.memory import show_bytes

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{contents.path}: {contents.kind}", markup=False)
    for line in plan.get("architecture", []):
        console.print(f"  {line}", markup=False)
    table = Table("key", "value", box=None, title="metadata", title_justify="left")
    for key, value in contents.metadata.items():
        table.add_row(key, one_line(value))
    console.print(table, markup=False)
    if with_tensors and contents.tensors:
        table = Table("tensor", "shape", "format", "size", box=None, title="tensors", title_justify="left")
        for tensor in contents.tensors:
            shape = " x ".join(str(size) for size in tensor.shape)
            table.add_row(tensor.name, shape, tensor.format, show_bytes(tensor.nbytes))
        console.print(table, markup=False)
    table = Table("format", "tensors", "values", "size", box=None, title="formats", title_justify="left")
    for name, group in contents.by_format().items():
        table.add_row(name, str(group["tensors"]), f"{group['values']:,}", show_bytes(group["bytes"]))
    console.print(table, markup=False)
    console.print("memory plan")
    for line in plan.get("lines", [f"cannot run: {plan.get('error')}"]) + plan.get("notes", []):
        console.print(f"  {line}", markup=False)


def one_line(value: Any, limit: int = 100) -> str:
    """One line of a value; unprintable characters are escaped."""
    if isinstance(value, dict) and value.keys() == {"length", "first"}:
        text = f"{value['length']} items: {', '.join(repr(item) for item in value['first'])}, ..."
    else:
        text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
