"""Speculation and beam search as a client watches them: token ids of an update become texts."""

from __future__ import annotations

from bifolio.api.messages import Update
from bifolio.serve.responses import Steps, WatchedBeam, WatchedBeamStep, WatchedDraft
from bifolio.serve.token_text import TokenTexts


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
