"""A model with its weights, ready to be prepared by a kernel set."""

from __future__ import annotations

from dataclasses import dataclass, field

from bifolio.model.text_model import TextModel
from bifolio.model.weights import ModelWeights


@dataclass(frozen=True)
class LoadedModel(TextModel):
    """A `TextModel` and its weights, which are views of the mapped files in the formats that the files have."""

    weights: ModelWeights = field(kw_only=True)
