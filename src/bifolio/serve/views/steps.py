"""Speculation and beam search as a client watches them: recorded by the engine, sent as token ids, shown as texts."""

from __future__ import annotations

from bifolio.api.messages import Update
from bifolio.sequence import BeamStep, DraftStep, Request
from bifolio.serve.http.token_text import TokenTexts
from bifolio.serve.protocols.openai_answers import Steps, WatchedBeam, WatchedBeamStep, WatchedDraft


def watched_steps(update: Update, first_choice: int, texts: TokenTexts) -> Steps | None:
    """The steps in an update, or None; `first_choice` is the index of the prompt's first choice."""
    if update.drafts is None and update.beams is None:
        return None
    drafts = [
        WatchedDraft(first_choice + index, position, [texts.text(token) for token in tokens], accepted)
        for index, position, tokens, accepted in update.drafts or []
    ]
    beams = [
        WatchedBeamStep(
            position, [WatchedBeam(parent, texts.text(token), token, score, end) for parent, token, score, end in rows]
        )
        for position, rows in update.beams or []
    ]
    return Steps(drafts, beams)


def add_steps(update: Update, request: Request) -> None:
    """Move the recorded steps of a watched request into the update."""
    if not request.steps:
        return
    drafts = [step for step in request.steps if isinstance(step, DraftStep)]
    beams = [step for step in request.steps if isinstance(step, BeamStep)]
    request.steps.clear()
    update.drafts = [(step.completion, step.position, list(step.drafts), step.num_accepted) for step in drafts] or None
    update.beams = [(step.position, list(step.beams)) for step in beams] or None
