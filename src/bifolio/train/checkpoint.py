"""Checkpoints of a run: weights and AdamW moments as safetensors, the rest as JSON, without pickle.

    checkpoint/step-00001500/{model,optimizer}.safetensors, state.json, and best.safetensors with --keep-best

The order of the data and the learning rate are functions of the step, so these files are the complete state: a resumed
run gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bifolio.api.language_model import LanguageModel
from bifolio.api.language_parameters import file_tensor
from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.huggingface.hf_loader import read_json
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.train.settings import FREE_ON_RESUME, TrainSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class History:
    """Losses and times measured by a run so far."""

    train: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss since the previous point)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    seconds: float = 0.0
    unfinished_point: tuple[float, int] = (0.0, 0)  # sum and number of the losses since the last training point

    @property
    def best(self) -> tuple[int, float] | None:
        """The evaluation with the lowest loss."""
        return min(self.held_out, key=lambda point: point[1], default=None)

    @property
    def last_evaluation(self) -> int | None:
        """The step of the best evaluation."""
        return self.held_out[-1][0] if self.held_out else None


def save_checkpoint(
    folder: Path,
    step: int,
    model: LanguageModel,
    optimizer: torch.optim.AdamW,
    history: History,
    settings: TrainSettings,
    digest: str,
    best_weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint under a temporary name, then remove the older one: a complete one exists at any time."""
    target, partial = folder / f"step-{step:08d}", folder / f"partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parameters = dict(model.named_parameters())
    write_safetensors(partial / "model.safetensors", {n: file_tensor(p) for n, p in parameters.items()})
    moments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        if state:
            moments |= {f"{moment}.{name}": file_tensor(state[moment]) for moment in MOMENTS}
    write_safetensors(partial / "optimizer.safetensors", moments)
    if best_weights is not None:
        write_safetensors(partial / "best.safetensors", {n: file_tensor(p) for n, p in best_weights.items()})
    state_json = {"step": step, "digest": digest, "settings": asdict(settings), "history": asdict(history)}
    (partial / "state.json").write_text(json.dumps(state_json) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    for other in folder.glob("step-*"):
        if other != target:
            shutil.rmtree(other)


def load_checkpoint(
    folder: Path, model: LanguageModel, optimizer: torch.optim.AdamW, settings: TrainSettings, digest: str
) -> tuple[int, History]:
    """Load the newest checkpoint into model and optimizer; return the number of completed steps and their history."""
    found = sorted(folder.glob("step-*"))
    if not found:
        raise ModelFileError(f"{folder} holds no checkpoint to resume from: train without --resume first")
    state = read_json(found[-1] / "state.json")
    _check_same_run(state, settings, digest, found[-1])
    if settings.steps < int(state["step"]):
        raise ConfigError(f"--steps is {settings.steps}, and the run in {folder} has done {state['step']}: pass more")
    model.load_safetensors(found[-1] / "model.safetensors")
    _load_moments(found[-1] / "optimizer.safetensors", model, optimizer, int(state["step"]))
    raw = state["history"]
    points = {name: [(int(step), float(loss)) for step, loss in raw[name]] for name in ("train", "held_out")}
    loss_sum, loss_count = raw["unfinished_point"]
    history = History(points["train"], points["held_out"], float(raw["seconds"]), (float(loss_sum), int(loss_count)))
    return int(state["step"]), history


def load_best_weights(folder: Path, model: LanguageModel) -> dict[str, torch.Tensor] | None:
    """The weights of the best evaluation, if the newest checkpoint holds them, on the model's device."""
    path = max(folder.glob("step-*")) / "best.safetensors"
    if not path.is_file():
        return None
    tensors = open_safetensors(path).tensors
    best: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != tuple(parameter.shape):
            raise ModelFileError(f"{path} has no usable {name}: the checkpoint is damaged")
        best[name] = torch.from_numpy(np.array(tensor.dequantize())).to(parameter.device)
    return best


def _check_same_run(state: dict[str, Any], settings: TrainSettings, digest: str, path: Path) -> None:
    """Raise ConfigError if the checkpoint belongs to a run with other data or settings."""
    if state.get("digest") != digest:
        raise ConfigError(f"{path} was made from other text or another tokenizer: pass the same data, or drop --resume")
    before, now = state.get("settings", {}), json.loads(json.dumps(asdict(settings)))
    changed = [n for n in now if n not in FREE_ON_RESUME and before.get(n) != now[n]]
    if changed:
        listed = ", ".join(f"{name} was {before.get(name)}, is {now[name]}" for name in changed)
        raise ConfigError(f"{path} belongs to a run with other settings ({listed}): pass the same, or drop --resume")


def _load_moments(path: Path, model: LanguageModel, optimizer: torch.optim.AdamW, step: int) -> None:
    tensors = open_safetensors(path).tensors
    for group in optimizer.param_groups:
        on_device = bool(group["fused"]) or bool(group["capturable"])
        for parameter in group["params"]:
            device = parameter.device if on_device else torch.device("cpu")
            optimizer.state[parameter]["step"] = torch.tensor(float(step), device=device)
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            tensor = tensors.get(f"{moment}.{name}")
            if tensor is None or tensor.shape != tuple(parameter.shape):
                raise ModelFileError(f"{path} has no usable {moment} of {name}: the checkpoint is damaged")
            value = torch.from_numpy(np.array(tensor.dequantize())).to(parameter.device)
            optimizer.state[parameter][moment] = value
