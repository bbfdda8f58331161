"""Saving and loading of texts: `LLM.save` and `LLM.load`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bifolio.adapter_salt import digest_of_adapter
from bifolio.api.branch import Branch
from bifolio.api.lora import LoRA
from bifolio.api.outputs import RequestOutput
from bifolio.engine.requests import as_token_ids
from bifolio.engine.tiers.snapshots import Snapshot, capture, read_snapshot, restore, write_snapshot
from bifolio.errors import RequestError
from bifolio.prompts import PromptTokens

if TYPE_CHECKING:
    from bifolio.api.llm import LLM

Saved: TypeAlias = "Branch | RequestOutput | PromptTokens | Sequence[int]"


def save(
    llm: LLM, text: Saved, path: str | Path, notes: dict[str, Any] | None = None, lora_request: LoRA = None
) -> int:
    """Write a text with its blocks; the bytes of the file."""
    if isinstance(text, Branch):
        if lora_request is not None:
            raise RequestError("a branch has the adapter that it was opened with: leave lora_request out")
        text.compute()
        adapter = text.adapter
    else:
        [adapter] = llm.adapters_for(lora_request, 1)
    tokens, num_prompt = _tokens_of(text)
    digest, images = digest_of_adapter(adapter), text.images if isinstance(text, Branch | PromptTokens) else None
    snapshot = llm.with_engine(
        lambda: capture(llm.engine, tokens, num_prompt=num_prompt, notes=notes, adapter=digest, images=images)
    )
    return write_snapshot(Path(path).expanduser(), snapshot)


def load(llm: LLM, path: str | Path, recompute: bool = False, lora_request: LoRA = None) -> tuple[Branch, Snapshot]:
    """The text as a branch, whose blocks are in the cache, and the snapshot."""
    snapshot = read_snapshot(Path(path).expanduser())
    [adapter] = llm.adapters_for(lora_request, 1)

    def opened() -> Branch:
        restore(llm.engine, snapshot, recompute=recompute, adapter=digest_of_adapter(adapter))
        images = snapshot.images_for(llm.model.vision)
        state = llm.branches.open(snapshot.token_ids, adapter=adapter, images=images)
        state.num_prompt = min(snapshot.num_prompt, len(snapshot.token_ids))
        return Branch(llm, state)

    return llm.with_engine(opened), snapshot


def _tokens_of(text: Saved) -> tuple[list[int], int]:
    """(All tokens, those of the prompt) of a text."""
    if isinstance(text, Branch):
        return text.token_ids, len(text) - len(text.answer_token_ids)
    if isinstance(text, RequestOutput):
        if len(text.outputs) != 1:
            raise RequestError(f"an output with {len(text.outputs)} completions is no single text: pass its tokens")
        prompt = list(text.prompt_token_ids)
        return [*prompt, *text.outputs[0].token_ids], len(prompt)
    tokens = as_token_ids(text.token_ids if isinstance(text, PromptTokens) else text)
    return list(tokens), len(tokens)
