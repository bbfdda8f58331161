"""Training of a head for multi-token prediction: `bifolio train --mtp MODEL`.

The result is a pair: the model with a trained head behind its last layer, in one folder of the layout of GLM-4.5, which
`--model FOLDER --speculative mtp` reads. Text, states and loss are those of EAGLE-3 heads (`train.head_run`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bifolio.errors import ConfigError
from bifolio.model.huggingface.folder_writer import DENSE, check_writable, write_folder
from bifolio.model.loaded import LoadedModel
from bifolio.quant.formats import QuantFormat
from bifolio.train.head_data import collect_states, rows_of
from bifolio.train.head_run import HeadResult, HeadRun, HeadSettings, train_head
from bifolio.train.mtp_head import MtpHead, pair_config
from bifolio.train.progress import Progress


@dataclass(frozen=True, slots=True)
class MtpSettings(HeadSettings):
    """Settings of one run."""

    output: str = "mtp"
    learning_rate: float = 4e-3


def train_mtp(settings: MtpSettings, progress: Progress | None = None) -> HeadResult:
    """Train a head and write the folder of the pair."""
    folder = Path(settings.output)

    def check(target: LoadedModel) -> None:
        check_writable(folder, overwrite=True)
        if folder.exists() and folder.resolve() == target.path.resolve():
            raise ConfigError(f"{folder} is the model itself: choose another --output")
        pair_config(target.weights)

    def start(target: LoadedModel, texts: np.ndarray) -> HeadRun:
        return _MtpRun(target, settings, texts)

    return train_head(settings, check, start, progress)


def body_format(model: LoadedModel) -> QuantFormat:
    """The type of a folder's tensors: that of the model's matrices if they have one dense type, f16 if quantised."""
    formats = set(model.weights.formats())
    if len(formats) == 1 and formats <= set(DENSE):
        return formats.pop()
    return QuantFormat.F16 if any(format.is_quantized for format in formats) else QuantFormat.F32


class _MtpRun(HeadRun):
    """A head that reads the last state of the target and shares its embedding and its output matrix."""

    def __init__(self, target: LoadedModel, settings: MtpSettings, texts: np.ndarray) -> None:
        self.config = pair_config(target.weights)
        self.mtp = MtpHead(self.config, rows_of(target.weights.head.parts[0]))
        self.mtp.start_from(target)
        super().__init__(target, settings, texts, collect_states(target, texts, (), settings.threads), self.mtp)

    def head_states(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return last

    def write(self, folder: Path) -> None:
        # the weights keep the order of query rows of the target, which the folder changes if it has another
        config = replace(self.config, rope_interleaved=self.target.config.rope_interleaved)
        pair = replace(self.target, config=config, weights=replace(self.target.weights, config=config))
        fields, format = {"num_nextn_predict_layers": 1}, body_format(self.target)
        write_folder(folder, pair, format, overwrite=True, fields=fields, tensors=self.mtp.tensors())
