"""`bifolio generate`: text from one prompt, or from a file of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from bifolio.cli import commands, options
from bifolio.config import NUMERICS
from bifolio.errors import RequestError


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(generate)


HELP = """Generate text.

Without --model, the embedded model writes a story. Text streams to standard output as it is generated."""
EPILOG = """Examples:

  bifolio generate "Once upon a time"

  bifolio generate -m ./SmolLM2-135M-Instruct.gguf "The capital of France is" -n 8 -t 0

  bifolio generate --speculative draft -t 0 -v "One day, a little dog"

  bifolio generate -m ./model --input prompts.jsonl --output answers.jsonl"""


def generate(
    prompt: Annotated[str | None, commands.argument(help="The text to continue; '-' reads standard input.")] = None,
    model: options.Model = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, commands.option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    json_schema: Annotated[
        Path | None, commands.option("--json-schema", help="A JSON schema that the text must follow.")
    ] = None,
    input_file: Annotated[
        Path | None,
        commands.option("--input", "-i", help="JSON lines with 'prompt' or 'prompt_token_ids', and sampling options."),
    ] = None,
    output_file: Annotated[
        Path | None,
        commands.option("--output", "-o", help="File for the results as JSON lines; default: standard output."),
    ] = None,
    speculative: options.Speculative = None,
    draft_model: options.DraftModel = None,
    memory: options.Memory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.AnyNumSeqs = None,
    block_size: options.AnyBlockSize = None,
    chunk_size: options.AnyChunkSize = None,
    kv_dtype: options.KvDtype = NUMERICS.kv_dtype,
    activations: options.Activations = NUMERICS.activations,
    threads: options.Threads = NUMERICS.threads,
    device: options.Device = NUMERICS.device,
    deterministic: options.Deterministic = NUMERICS.deterministic,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    verbose: options.Verbose = False,
) -> None:
    from bifolio.api.llm import LLM

    llm = LLM(
        model,
        dtype=kv_dtype,
        memory=memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        chunk_size=chunk_size,
        activations=activations,
        threads=threads,
        device=device,
        deterministic=deterministic or None,
        gpu_memory_utilization=gpu_memory_utilization,
        speculative=options.speculative_config(speculative, draft_model),
        verbose=verbose,
    )
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos or None,
    }
    if json_schema is not None:
        from bifolio.sampling.grammar import read_schema

        given["grammar"] = read_schema(json_schema)
    explicit = {name: value for name, value in given.items() if value is not None}
    if input_file is not None:
        run_file(llm, input_file, output_file, explicit)
    else:
        most = 256 if prompt is not None else llm.engine.config.max_model_len  # a story ends by itself
        stream_one(llm, prompt, {"max_tokens": most, **explicit})
    if verbose and llm.engine.speculator is not None:
        stats = llm.engine.speculator.stats
        share = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses were right"
        print(f"  speculation      {share} ({stats.acceptance_rate:.0%})", file=sys.stderr)


def stream_one(llm: Any, prompt: str | None, explicit: dict[str, Any]) -> None:
    text = sys.stdin.read() if prompt == "-" else prompt
    if text is None:
        text = "Once upon a time"
    sys.stdout.write(text)
    sys.stdout.flush()
    for result in llm.stream(text, llm.default_params(**explicit)):
        sys.stdout.write(result.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def run_file(llm: Any, source: Path, target: Path | None, explicit: dict[str, Any]) -> None:
    """JSON lines in, JSON lines out, in the same order; an `id` is copied to the result."""
    entries = read_jsonl(source)
    prompts, params = [], []
    for number, entry in entries:
        prompt = entry.get("prompt_token_ids", entry.get("prompt"))
        if not isinstance(prompt, str | list):
            raise commands.BadParameter(f"{source}:{number}: needs a text 'prompt' or a list 'prompt_token_ids'")
        prompts.append(prompt)
        params.append(line_params(llm, f"{source}:{number}", entry, explicit))
    outputs = llm.generate(prompts, params)
    stream = sys.stdout if target is None else target.open("w", encoding="utf-8")
    try:
        for (_, entry), output in zip(entries, outputs, strict=True):
            record = {**({"id": entry["id"]} if "id" in entry else {}), **as_record(output)}
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    finally:
        if target is not None:
            stream.close()


def line_params(llm: Any, place: str, entry: dict[str, Any], explicit: dict[str, Any]) -> Any:
    options_of_line = {k: v for k, v in entry.items() if k not in ("prompt", "prompt_token_ids", "id")}
    try:
        return llm.default_params(**{**explicit, **options_of_line})
    except (TypeError, RequestError) as error:  # TypeError: a name that is no sampling option
        raise commands.BadParameter(f"{place}: {error}") from error


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    if not path.is_file():
        raise commands.BadParameter(f"{path} does not exist")
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise commands.BadParameter(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise commands.BadParameter(f'{path}:{number}: every line is an object such as {{"prompt": "Hello"}}')
        entries.append((number, entry))
    return entries


def as_record(output: Any) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {"text": item.text, "token_ids": item.token_ids, "finish_reason": item.finish_reason}
            for item in output.outputs
        ],
    }
