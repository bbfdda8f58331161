"""vLLM's way to ask for structured output: `SamplingParams(structured_outputs=StructuredOutputsParams(...))`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.errors import RequestError


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """One constraint on the text of an output."""

    json: Mapping[str, Any] | str | None = None  # a JSON schema, or a class of pydantic models
    regex: str | None = None  # the text matches as a whole
    choice: list[str] | None = None  # the text is one of these
    grammar: str | None = None  # a Lark grammar
    json_object: bool | None = None  # any JSON object
    structural_tag: Mapping[str, Any] | str | None = None  # free text with parts that follow schemas

    def __post_init__(self) -> None:
        schema_of = getattr(self.json, "model_json_schema", None)
        if schema_of is not None:
            object.__setattr__(self, "json", schema_of())
        given = [self.json, self.regex, self.choice, self.grammar, self.json_object or None, self.structural_tag]
        if sum(value is not None for value in given) != 1:
            raise RequestError("pass exactly one of json, regex, choice, grammar, json_object and structural_tag")


GuidedDecodingParams = StructuredOutputsParams  # its older name in vLLM
