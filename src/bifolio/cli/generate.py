"""`bifolio generate`: text from one prompt, from piped text, or from a file of prompts."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, options, output_files

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.api.outputs import RequestOutput
    from bifolio.api.prompts import Prompt
    from bifolio.beam_params import BeamSearchParams
    from bifolio.sampling.grammar import Grammar
    from bifolio.sampling_params import SamplingParams

HELP = """Generate text.

Without --model, the embedded model writes a story. Text streams to standard output as it is generated: behind the
prompt on a terminal, alone in a pipe."""
EPILOG = """Examples:

  bifolio generate "Once upon a time"

  bifolio generate -m ./SmolLM2-135M-Instruct.gguf "The capital of France is" -n 8 -t 0

  cat notes.txt | bifolio generate -m ./model > continued.txt

  bifolio generate "A girl:" --json-schema '{"type": "object", "properties": {"name": {"type": "string"}}}'

  bifolio generate -m ./Qwen2.5-Coder.gguf "total = " --suffix "  # the sum of prices"

  bifolio generate -m ./gemma-3-4b-it "What is this?" --image photo.jpg

  bifolio generate --beams 4 -n 32 "One day, a little dog"

  bifolio generate -m ./model --lora ./adapter "Once upon a time"

  bifolio generate -m ./model --input prompts.jsonl --output answers.jsonl"""
STORY = "Once upon a time"  # where there is neither a prompt nor piped text
DEFAULT_TOKENS = 256  # of one prompt, and of each line of a file
NOT_WITH_BEAMS = ("temperature", "top_p", "top_k", "min_p", "seed")


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(generate)


def generate(
    sampling: options.Sampling,
    engine: options.BatchEngine,
    prompt: Annotated[
        str | None, commands.argument(help="The text to continue; default: piped standard input.")
    ] = None,
    model: options.Model = None,
    lora: options.Lora = None,
    suffix: Annotated[
        str | None,
        commands.option("--suffix", help="Text after the gap that a model with fill-in-the-middle tokens fills in."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        commands.option("--image", help="Image that the prompt is about, before its text; several times for several."),
    ] = None,
    ignore_eos: Annotated[bool, commands.option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    beams: Annotated[
        int | None, commands.option("--beams", min=1, help="Beam search with this many beams; prints the best text.")
    ] = None,
    json_schema: Annotated[
        str | None, commands.option("--json-schema", help="JSON schema that the text must follow: a file, or inline.")
    ] = None,
    echo: Annotated[
        bool | None, commands.option(help="Print the prompt before its continuation; default: on a terminal.")
    ] = None,
    as_json: Annotated[
        bool, commands.option("--json", help="Print one JSON object with text, token ids and finish reason.")
    ] = False,
    input_file: Annotated[
        Path | None,
        commands.option(
            "--input",
            "-i",
            help="JSON lines with 'prompt', 'prompt_token_ids' or 'messages', and sampling options.",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        commands.option(
            "--output",
            "-o",
            read=output_files.output_file,
            help="File for the text, with --input for JSON lines; default: standard output.",
        ),
    ] = None,
    receipts: Annotated[
        Path | None,
        commands.option("--receipts", read=output_files.output_folder, help="Folder that gets a receipt per answer."),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    explicit = sampling.explicit()
    if ignore_eos:
        explicit["ignore_eos"] = True
    if json_schema is not None:
        explicit["grammar"] = read_grammar(json_schema)
    if input_file is not None:
        check_alone(prompt, suffix, echo)
        if image:
            raise commands.BadParameter("--image is for one prompt: leave --input out")
    text = given_text(prompt) if input_file is None else None
    if suffix is not None:
        text = text or ""
        if image:
            raise commands.BadParameter("a prompt has either --suffix or --image: leave one of them out")
    llm = engine.llm(model, lora, verbose=verbose)
    if input_file is not None:
        run_file(llm, input_file, output_file, {"max_tokens": DEFAULT_TOKENS, **explicit}, beams, receipts)
    else:
        most = DEFAULT_TOKENS if text is not None else llm.engine.config.max_model_len  # a story ends by itself
        params = request_params(llm, {"max_tokens": most, **explicit}, beams)
        if echo is None:
            echo = json_schema is None and (text is None or (output_file is None and sys.stdout.isatty()))
        text = STORY if text is None else text
        run_one(llm, text, params, echo, as_json, output_file, suffix, image or [], receipts)
    if verbose and llm.engine.speculator is not None:
        stats = llm.engine.speculator.stats
        share = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses were right"
        print(f"  speculation      {share} ({stats.acceptance_rate:.0%})", file=sys.stderr)


def check_alone(prompt: str | None, suffix: str | None, echo: bool | None) -> None:
    """Refuse options of one prompt beside a file of prompts."""
    if suffix is not None:
        raise commands.BadParameter("--suffix is for one prompt: put a 'suffix' into the lines of --input")
    if prompt is not None:
        raise commands.BadParameter("PROMPT has no effect with --input: put it into a line, or leave --input out")
    if echo is not None:
        raise commands.BadParameter("--echo is for one prompt: the lines of --output have their prompts")


def given_text(prompt: str | None) -> str | None:
    """The prompt, or piped text where the prompt is '-' or missing; None where there is neither."""
    if prompt == "-":
        return read_standard_input()
    if prompt is not None or not is_piped(sys.stdin):
        return prompt
    return read_standard_input().removesuffix("\n") or None


def read_standard_input() -> str:
    """All of standard input, as UTF-8 in any locale."""
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:
        return sys.stdin.read()
    from bifolio.text.utf8 import decoded

    return decoded(binary.read(), "standard input").replace("\r\n", "\n")


def is_piped(stream: Any) -> bool:
    """Whether a pipe or a file stands behind a stream: a terminal or /dev/null has no prompt to offer."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return bool(stream is not None and not stream.isatty())
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_grammar(schema: str) -> Grammar:
    """A JSON schema from a file, or from the option itself where it begins with a brace."""
    from bifolio.sampling.grammar import Grammar, check_bounds, read_schema

    if not schema.lstrip().startswith("{"):
        return read_schema(Path(schema))
    grammar = Grammar.json_schema(schema)
    check_bounds(grammar)
    return grammar


def request_params(llm: LLM, explicit: dict[str, Any], beams: int | None) -> SamplingParams | BeamSearchParams:
    """Parameters of a request: of a beam search where beams are asked for."""
    if beams is None:
        return llm.default_params(**explicit)
    from bifolio.beam_params import BeamSearchParams

    for name in NOT_WITH_BEAMS:
        if name in explicit:
            raise commands.BadParameter(f"{name} has no meaning with --beams: leave one of them out")
    return BeamSearchParams(beam_width=beams, **explicit)


def run_one(
    llm: LLM,
    text: str,
    params: SamplingParams | BeamSearchParams,
    echo: bool,
    as_json: bool,
    target: Path | None = None,
    suffix: str | None = None,
    images: Sequence[Path] = (),
    receipts: Path | None = None,
) -> None:
    """Print the continuation of a text, or the text of its gap before a suffix, or write it.

    Nothing is printed before the request was checked.
    """
    prompt: Prompt = text if suffix is None else {"prompt": text, "suffix": suffix}
    if images:
        prompt = with_image_files(llm, text, images)
    before, after = (text, suffix or "") if echo else ("", "")
    if as_json or target is not None:
        import json

        from bifolio.cli.prompt_files import as_record

        (output,) = complete(llm, [prompt], [params], receipts)
        whole = before + output.outputs[0].text + after
        deliver(target, (json.dumps(as_record(output), ensure_ascii=False) if as_json else whole) + "\n")
        return
    from bifolio.api.receipts import write_receipt
    from bifolio.sampling_params import SamplingParams

    if isinstance(params, SamplingParams):
        stream = llm.stream(prompt, params)
        write(before)
        for result in stream:
            write(result.text)
        if receipts is not None:
            write_receipt(receipts, "1", llm.receipt(stream.requests[0]))
    else:
        (output,) = complete(llm, [prompt], [params], receipts)
        write(before + output.outputs[0].text)
    write(after + "\n")


def with_image_files(llm: LLM, text: str, files: Sequence[Path]) -> Prompt:
    """A prompt about images: a question of a user where the model has a chat template."""
    from bifolio.api.images import image_of_file, required_vision

    vision = required_vision(llm.model)
    images = [image_of_file(file) for file in files]
    if llm.model.chat_template is None:
        return {"prompt": vision.placeholder * len(images) + text, "multi_modal_data": {"image": images}}
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return llm.chat_prompt([{"role": "user", "content": parts}])


def complete(llm: LLM, prompts: list[Any], params: list[Any], receipts: Path | None = None) -> list[RequestOutput]:
    """Complete prompts; `receipts` gets a receipt of each, by its number from 1 on."""
    from bifolio.api.receipts import write_receipt
    from bifolio.beam_params import BeamSearchParams

    is_search = any(isinstance(each, BeamSearchParams) for each in params)
    run = llm.beam_search if is_search else llm.generate
    outputs = run(prompts, params, receipts=receipts is not None)
    for number, output in enumerate(outputs, start=1):
        if receipts is not None and output.receipt is not None:
            write_receipt(receipts, str(number), output.receipt)
    return outputs


def run_file(
    llm: LLM,
    source: Path,
    target: Path | None,
    explicit: dict[str, Any],
    beams: int | None,
    receipts: Path | None = None,
) -> None:
    """JSON lines in, JSON lines out, in the same order."""
    from bifolio.beam_params import BeamSearchParams
    from bifolio.cli.prompt_files import read_prompts, result_lines
    from bifolio.errors import RequestError
    from bifolio.sampling_params import SamplingParams

    lines = read_prompts(source)
    prompts, params = [], []
    for line in lines:
        own = line.options(SamplingParams if beams is None else BeamSearchParams)
        prompts.append(line.prompt(llm))
        try:
            params.append(request_params(llm, {**explicit, **own}, beams))
        except RequestError as error:
            raise commands.BadParameter(f"{line.place}: {error}") from error
    text = "".join(record + "\n" for record in result_lines(lines, complete(llm, prompts, params, receipts)))
    deliver(target, text)


def deliver(target: Path | None, text: str) -> None:
    """Write a result to its file, or to standard output."""
    if target is None:
        write(text)
    else:
        output_files.write_output(target, text)


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
