"""Files of prompts for `bifolio generate --input`: JSON lines with a prompt and options each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bifolio.cli import commands
from bifolio.errors import RequestError

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.api.outputs import RequestOutput
    from bifolio.api.prompts import Prompt

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
OWN_FIELDS = (*PROMPT_FIELDS, "suffix", "id")  # all others are sampling options


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a file."""

    place: str  # "prompts.jsonl:3"
    values: dict[str, Any]

    def prompt(self, llm: LLM) -> Prompt:
        """The prompt, in the form that `LLM.generate` takes."""
        given = [name for name in PROMPT_FIELDS if name in self.values]
        if len(given) != 1:
            wanted = "a text 'prompt', a list 'prompt_token_ids' or a list 'messages'"
            raise commands.BadParameter(f"{self.place}: needs one of {wanted}, not {len(given)} of them")
        value = self.values[given[0]]
        if given[0] == "messages":
            if "suffix" in self.values:
                raise commands.BadParameter(f"{self.place}: 'suffix' follows a 'prompt', not 'messages'")
            try:
                return llm.chat_prompt(value)
            except RequestError as error:
                raise commands.BadParameter(f"{self.place}: {error}") from error
        if not isinstance(value, str if given[0] == "prompt" else list):
            raise commands.BadParameter(f"{self.place}: 'prompt' is text and 'prompt_token_ids' a list of token ids")
        suffix = self.values.get("suffix")
        if suffix is not None and not isinstance(suffix, str):
            raise commands.BadParameter(f"{self.place}: 'suffix' is text, not {suffix!r}")
        return {given[0]: value} if suffix is None else {given[0]: value, "suffix": suffix}

    def options(self, params: type) -> dict[str, Any]:
        """The sampling options of the line; a field that `params` does not have is refused by name."""
        found = {name: value for name, value in self.values.items() if name not in OWN_FIELDS}
        known = [field.name for field in fields(params) if field.init]
        for name in found:
            if name not in known:
                hint = commands.did_you_mean(name, [*known, *OWN_FIELDS])
                raise commands.BadParameter(f"{self.place}: {name!r} is not a field of a line{hint}")
        return found


def read_prompts(path: Path) -> list[PromptLine]:
    """Every line that is not blank."""
    if not path.is_file():
        raise commands.BadParameter(f"--input {path} does not exist: pass a file of JSON lines")
    from bifolio.text.utf8 import read_text

    lines = []
    for number, text in enumerate(read_text(path, "--input").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except ValueError as error:
            raise commands.BadParameter(f"{path}:{number}: not JSON ({error}): write one object a line") from error
        if not isinstance(values, dict):
            raise commands.BadParameter(f'{path}:{number}: every line is an object such as {{"prompt": "Hello"}}')
        lines.append(PromptLine(f"{path}:{number}", values))
    return lines


def result_lines(lines: Iterable[PromptLine], outputs: Iterable[RequestOutput]) -> list[str]:
    """Results as JSON lines, in the order of the prompts; an `id` is copied to the result."""
    records = []
    for line, output in zip(lines, outputs, strict=True):
        own = {"id": line.values["id"]} if "id" in line.values else {}
        records.append(json.dumps({**own, **as_record(output)}, ensure_ascii=False))
    return records


def as_record(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "text": item.text,
                "token_ids": item.token_ids,
                "finish_reason": item.finish_reason,
                **({} if item.score is None else {"score": item.score}),
            }
            for item in output.outputs
        ],
    }
