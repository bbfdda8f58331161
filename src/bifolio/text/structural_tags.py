"""Structural tags: free text in which a trigger begins a part that follows a schema.

    free text <function=weather>{"city": "Rome"}</function> free text
              |<---- begin ---->|<--- schema -->|<-- end -->|
              |<trigger->|

Two forms are read, both as vLLM and SGLang take them: `{"structures": [{"begin", "schema", "end"}], "triggers":
[...]}`, and `{"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content", "end"}], ...}}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.errors import GrammarError
from bifolio.text.tools.format import LarkWriter

MOST_TAGS = 128
_OUTER = frozenset(("type", "structures", "triggers", "format"))
_FORMAT = frozenset(("type", "tags", "triggers", "at_least_one", "stop_after_first"))


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of the text: `begin`, JSON that follows the schema, `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """The tags of a text by trigger."""

    by_trigger: Mapping[str, tuple[Tag, ...]]
    at_least_one: bool = False  # the text has a tag
    stop_after_first: bool = False  # the text ends with its first tag

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tag.schema for tags in self.by_trigger.values() for tag in tags]

    def source(self, token_ids: Mapping[str, int]) -> str:
        """The grammar, of the kind `tools`; `token_ids`: texts that are tokens of their own in the vocabulary."""
        lark, blocks = LarkWriter(token_ids), []
        for trigger, tags in self.by_trigger.items():
            bodies = [self._body(lark, tag, len(trigger), token_ids) for tag in tags]
            rest = bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"
            blocks.append(lark.fresh_rule(f"{lark.after_text(trigger)} {rest}"))
        block = lark.fresh_rule(" | ".join(blocks))
        more = "" if self.stop_after_first else f" {block}* TEXT"
        least = f"{block}{more}"
        lark.rule("start", least if self.at_least_one else f"{block} | TEXT" if self.stop_after_first else more)
        return lark.source()

    @staticmethod
    def _body(lark: LarkWriter, tag: Tag, start: int, token_ids: Mapping[str, int]) -> str:
        parts = [*_parts(lark, tag.begin[start:], token_ids), lark.schema(tag.schema)]
        return lark.fresh_rule(" ".join([*parts, *_parts(lark, tag.end, token_ids)]))


def read_structural_tags(value: Any) -> StructuralTags:
    """Tags from the JSON of a request; a `GrammarError` names the part that cannot be used."""
    fields = _object("the structural_tag", value, _OUTER)
    if fields.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"the type of a structural_tag is 'structural_tag', not {fields['type']!r}")
    if ("format" in fields) == ("structures" in fields):
        raise GrammarError("a structural_tag needs either `structures` with `triggers`, or `format`")
    if "structures" in fields:
        return _tags(fields["structures"], fields.get("triggers"), "structures")
    if "triggers" in fields:
        raise GrammarError("the triggers of a `format` belong into it: move `triggers` there")
    form = _object("the format", fields["format"], _FORMAT)
    if form.get("type") != "triggered_tags":
        raise GrammarError(f"the format {form.get('type')!r} is not supported: use 'triggered_tags'")
    flags = {name: form.get(name, False) for name in ("at_least_one", "stop_after_first")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise GrammarError(f"{name} is true or false, not {flag!r}")
    return _tags(form.get("tags"), form.get("triggers"), "tags", **flags)


def _tags(items: Any, triggers: Any, name: str, **flags: bool) -> StructuralTags:
    if not isinstance(items, list) or not 1 <= len(items) <= MOST_TAGS:
        raise GrammarError(f"`{name}` is a list of 1 to {MOST_TAGS} objects")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
        raise GrammarError("`triggers` is a list of texts, at least one, and none of them is empty")
    found: dict[str, tuple[Tag, ...]] = {}
    for item in items:
        tag = _tag(item)
        fitting = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if not fitting:
            raise GrammarError(f"no trigger is the beginning of {tag.begin!r}: add one to `triggers`")
        trigger = min(fitting, key=len)  # the shortest is seen first
        if any(other.begin == tag.begin for other in found.get(trigger, ())):
            raise GrammarError(f"two tags begin with {tag.begin!r}: give them different beginnings")
        found[trigger] = (*found.get(trigger, ()), tag)
    for trigger in triggers:
        if not any(trigger.startswith(used) for used in found):
            raise GrammarError(f"no tag begins with the trigger {trigger!r}: leave it out")
    return StructuralTags(found, **flags)


def _tag(item: Any) -> Tag:
    fields = _object("a tag", item, frozenset(("begin", "schema", "end", "content", "type")))
    begin, end = fields.get("begin"), fields.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str) or not begin:
        raise GrammarError("a tag has a text `begin` that is not empty, and a text `end`")
    if "content" in fields:
        content = _object("the content of a tag", fields["content"], frozenset(("type", "json_schema")))
        if content.get("type") != "json_schema":
            raise GrammarError(f"the content {content.get('type')!r} of a tag is not supported: use 'json_schema'")
        schema = content.get("json_schema")
    else:
        schema = fields.get("schema")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"the tag {begin!r} needs a JSON schema")
    return Tag(begin, schema, end)


def _object(name: str, value: Any, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"{name} is a JSON object")
    for key in value:
        if key not in known:
            raise GrammarError(f"{name} has no field {key!r}: use {', '.join(sorted(known))}")
    return value


def _parts(lark: LarkWriter, text: str, token_ids: Mapping[str, int]) -> Iterator[str]:
    """The text in the terms of the grammar; texts of tokens of their own may be written as these tokens."""
    if not text:
        return
    if not token_ids:
        yield lark.text(text)
        return
    longest_first = sorted(token_ids, key=len, reverse=True)
    for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
        if part:
            yield lark.marker(part)
