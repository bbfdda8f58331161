"""The same requests to bifolio and to vLLM on one GPU, in turns, each through its public API.

    python benchmarks/peers_gpu.py --shapes llama-1b --peer-env peer-env.sh --json peers.json
    python benchmarks/peers_gpu.py --shapes qwen3-30b-a3b,gpt-oss-20b --engines bifolio --rows single,greedy
    python benchmarks/peers_gpu.py --read peers.json --plot peers.png

Both engines read the same folder with random bf16 weights. Every round starts each engine in a process of its own, one
after the other, and runs every row; every pass of a row has prompts of its own, so that no prefix cache helps, except
in the row about a common prefix. The figure of a row is the median of all passes. `--peer-env` is a shell file that
sets up the environment in which `import vllm` works; without vLLM only bifolio runs. Shapes with experts are created on
the device instead of in a folder, for bifolio alone. Only runs of this program are
quoted as comparisons: hosts differ in speed, and the engines depend on it to different degrees.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 5e5},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5},
    "llama-3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
                 "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 5e5},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6},
}  # fmt: skip
IN_MEMORY = ("qwen3-30b-a3b", "gpt-oss-20b")  # shapes of `bifolio.measure.gpu_models`
LONG = 16084  # tokens of the long context
TOP_P = {"temperature": 0.8, "top_p": 0.95}
PROMPTS = {"prompt8k": 8000, "prompt16k": 16000, "prompt32k": 32000, "continued": 4000}  # tokens that are computed
CACHED = 28000  # tokens in the cache before the prompt of the row "continued"
ROWS = ("greedy", "top_p", "n8", "scored", "single", "long", "decode64", "prefix", *PROMPTS)
TITLES = {
    "greedy": "256 requests, greedy, tok/s",
    "top_p": "256 requests, top-p 0.95, tok/s",
    "n8": "16 prompts, n = 8, top-p, tok/s",
    "scored": "256 requests, top-p, penalties, logprobs 5, tok/s",
    "single": "one sequence, ms/token",
    "long": f"one sequence at {LONG} tokens, ms/token",
    "decode64": "64 sequences at 2048 tokens, tok/s",
    "prefix": "64 requests behind 4096 common tokens, tok/s",
    "prompt8k": "a prompt of 8,000 tokens, ms",
    "prompt16k": "a prompt of 16,000 tokens, ms",
    "prompt32k": "a prompt of 32,000 tokens, ms",
    "continued": "4,000 tokens after a cached prefix of 28,000, ms",
}


def write_folder(root: Path, name: str) -> Path:
    """A Hugging Face folder with random weights."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    shape, folder = SHAPES[name], root / name
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    is_qwen, hidden, heads, dim = (
        name.startswith("qwen"),
        shape["hidden_size"],
        shape["num_attention_heads"],
        shape["head_dim"],
    )
    config = {
        **shape, "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"], "hidden_act": "silu",
        "model_type": "qwen3" if is_qwen else "llama", "num_key_value_heads": 8, "attention_bias": False,
        "max_position_embeddings": 40960 if is_qwen else 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    generator = torch.Generator(device="cuda").manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(tensor: str, rows: int, columns: int) -> None:
        numbers = torch.randn((rows, columns), generator=generator, device="cuda", dtype=torch.bfloat16)
        tensors[tensor] = (numbers * columns**-0.5).cpu()

    def ones(tensor: str, count: int) -> None:
        tensors[tensor] = torch.ones(count, dtype=torch.bfloat16)

    matrix("model.embed_tokens.weight", shape["vocab_size"], hidden)
    if not shape["tie_word_embeddings"]:
        matrix("lm_head.weight", shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", heads * dim), ("k", 8 * dim), ("v", 8 * dim)):
            matrix(f"{prefix}self_attn.{part}_proj.weight", rows, hidden)
        matrix(f"{prefix}self_attn.o_proj.weight", hidden, heads * dim)
        for part in ("gate", "up"):
            matrix(f"{prefix}mlp.{part}_proj.weight", shape["intermediate_size"], hidden)
        matrix(f"{prefix}mlp.down_proj.weight", hidden, shape["intermediate_size"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            ones(f"{prefix}{norm}.weight", hidden)
        if is_qwen:
            for norm in ("q_norm", "k_norm"):
                ones(f"{prefix}self_attn.{norm}.weight", dim)
    ones("model.norm.weight", hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Engine:
    """One of the two libraries; both have the same names here."""

    def __init__(self, library: str, folder: Path, options: dict[str, Any]) -> None:
        module: Any = importlib.import_module(library)
        if library == "bifolio":
            options = {"device": "cuda", **options}
        self._params = module.SamplingParams
        model: Any = str(folder)
        if folder.name in IN_MEMORY:
            from bifolio.measure.gpu_models import random_weights

            model = random_weights(folder.name, "cuda")
            self.vocab_size = model.config.vocab_size
        else:
            self.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.llm = module.LLM(model, **{"max_model_len": LONG + 300, **options})
        self._random = random.Random(0)

    def params(self, num_new: int, **options: Any) -> Any:
        usual = {"temperature": 0.0, "max_tokens": num_new, "ignore_eos": True, "detokenize": False}
        return self._params(**{**usual, **options})

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(4, self.vocab_size) for _ in range(count)]

    def seconds(self, prompts: list[list[int]], params: Any) -> tuple[float, int]:
        """Seconds of one call, and the tokens it generated."""
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    def rate(self, prompts: list[list[int]], params: Any) -> float:
        seconds, count = self.seconds(prompts, params)
        return count / seconds


def run_row(engine: Engine, row: str, passes: int) -> list[float]:
    """The figures of all passes; the first pass of a row is one of them."""
    draws = random.Random(1)
    tokens, params = engine.tokens, engine.params
    options: dict[str, Any] = {"greedy": {}, "top_p": TOP_P}.get(row, {})
    if row == "scored":
        options = {**TOP_P, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 5}
    found = []
    for _ in range(passes):
        if row in ("greedy", "top_p", "scored"):
            prompts = [tokens(draws.randint(100, 1024)) for _ in range(256)]
            found.append(engine.rate(prompts, [params(draws.randint(100, 1024), **options) for _ in prompts]))
        elif row == "n8":
            found.append(engine.rate([tokens(512) for _ in range(16)], params(256, n=8, **TOP_P)))
        elif row == "decode64":
            found.append(engine.rate([tokens(2048) for _ in range(64)], params(256)))
        elif row in PROMPTS:
            cached = tokens(CACHED if row == "continued" else 0)
            if cached:
                engine.seconds([cached], params(1))
            found.append(1e3 * engine.seconds([cached + tokens(PROMPTS[row])], params(1))[0])
        elif row == "prefix":
            common = tokens(4096)
            engine.seconds([common], params(1))
            found.append(engine.rate([common + tokens(64) for _ in range(64)], params(256)))
        else:
            length, num_new = (128, 257) if row == "single" else (LONG, 129)
            first, _ = engine.seconds([tokens(length)], params(1))
            whole, _ = engine.seconds([tokens(length)], params(num_new))
            found.append(1e3 * (whole - first) / (num_new - 1))
    return found


def child(library: str, folder: Path, rows: list[str], passes: int, options: dict[str, Any]) -> None:
    start = time.perf_counter()
    engine = Engine(library, folder, options)
    print("RESULT", json.dumps({"row": "start", "values": [time.perf_counter() - start]}), flush=True)
    for row in rows:
        try:
            values = run_row(engine, row, passes)
        except Exception as error:
            print(f"{library} {row}: {error!r}", file=sys.stderr, flush=True)
            continue
        print("RESULT", json.dumps({"row": row, "values": values}), flush=True)


def run_child(library: str, arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    command = [
        sys.executable,
        __file__,
        "--child",
        library,
        "--folder",
        str(folder),
        "--rows",
        ",".join(arguments.rows),
    ]
    options = arguments.options if library == "bifolio" else arguments.peer_options
    command += ["--passes", str(arguments.passes), "--options", options]
    if library == "vllm" and arguments.peer_env:
        quoted = " ".join(f"'{part}'" for part in ["python3", *command[1:]])
        command = ["bash", "-c", f". {arguments.peer_env} && exec {quoted}"]
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ}  # its default needs a package of its own
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        stdout, stderr = process.communicate(timeout=arguments.timeout)
    except subprocess.TimeoutExpired:
        print(f"{library} took longer than {arguments.timeout} s: its later rows are missing", file=sys.stderr)
        os.killpg(process.pid, signal.SIGKILL)  # engine processes of its own included: they hold the GPU's memory
        stdout, stderr = process.communicate()
    lines = [json.loads(line[7:]) for line in stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        causes = [line for line in (stdout + stderr).splitlines() if "Error" in line]
        print(f"{library} did not run:", *causes[:12], stderr[-1500:], sep="\n", file=sys.stderr)
    return {line["row"]: line["values"] for line in lines}


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"host": host_speed(), "shapes": {}}
    for shape in arguments.shapes:
        if shape not in IN_MEMORY:
            subprocess.run([sys.executable, __file__, "--write", shape, "--models", arguments.models], check=True)
        folder = Path(arguments.models) / shape
        found: dict[str, dict[str, list[float]]] = {}
        result["shapes"][shape] = found
        for _ in range(arguments.rounds):
            for library in arguments.engines:
                for row, values in run_child(library, arguments, folder).items():
                    found.setdefault(row, {}).setdefault(library, []).extend(values)
                if arguments.json:  # the results so far: the next engine may take too long
                    Path(arguments.json).write_text(json.dumps(result))
        print_table(shape, found)
    return result


def host_speed() -> float:
    """Millions of Python loop iterations per second: the speed of the host, stated beside each comparison."""
    start = time.perf_counter()
    for _ in range(10_000_000):
        pass
    return 10 / (time.perf_counter() - start)


def print_table(shape: str, found: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n{shape}: median of all passes (passes)")
    for row, engines in found.items():
        cells = []
        for name, values in engines.items():
            passes = ", ".join(f"{value:,.2f}" for value in values)
            cells.append(f"{name} {statistics.median(values):,.3f} ({passes})")
        print(f"  {TITLES.get(row, row + ', s')}: " + "; ".join(cells), flush=True)


def plot(result: dict[str, Any], target: str) -> None:
    """The ratio of bifolio to vLLM in every row; above 1 bifolio is faster."""
    from bifolio.measure.figures import new_figure, plain_axes

    names, ratios = [], []
    for shape, found in result["shapes"].items():
        for row, engines in found.items():
            if row in TITLES and {"bifolio", "vllm"} <= engines.keys():
                ratio = statistics.median(engines["bifolio"]) / statistics.median(engines["vllm"])
                names.append(f"{shape}: {TITLES[row].rsplit(', ', 1)[0]}")
                ratios.append(1 / ratio if "ms" in TITLES[row].rsplit(", ", 1)[1] else ratio)
    figure = new_figure(9, 0.45 * len(names) + 1)
    axes = figure.subplots()
    plain_axes(axes)
    axes.barh(range(len(names)), ratios, color="#1b6ca8")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#c46210")
    axes.set_xlabel("speed of bifolio / speed of vLLM, one machine, in turns")
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["llama-1b"])
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS))
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["bifolio", "vllm"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--options", default="{}", help="further arguments of bifolio.LLM as JSON")
    parser.add_argument("--peer-options", default="{}", help="further arguments of vllm.LLM as JSON")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "peers-gpu"))
    parser.add_argument("--peer-env", help="a shell file that makes `import vllm` work")
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--read", help="draw the results of this file instead of measuring")
    parser.add_argument("--plot")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_folder(Path(arguments.models), arguments.write)
        os._exit(0)  # faster than freeing the GPU's memory
    if arguments.child:
        child(arguments.child, Path(arguments.folder), arguments.rows, arguments.passes, json.loads(arguments.options))
        return
    result = json.loads(Path(arguments.read).read_text()) if arguments.read else compare(arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
