"""Training of a low-rank adapter: `bifolio train --lora MODEL`.

The matrices of attention and of the MLPs get changes up @ down, which are trained on text while the model itself stays
as it is. Quantised weights are dequantised for the run. The result is a folder in the layout of PEFT (docs/lora.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.engine.host_batch import HostBatch, Run
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Adapter, AdapterUse, Experts, Linear, LowRank
from bifolio.kernels.select import select_kernels
from bifolio.model import transformer
from bifolio.model.adapters.adapter import folder_factors
from bifolio.model.adapters.layout import TracedTensor, traced_layers
from bifolio.model.adapters.peft_folder import CONFIG, WEIGHTS
from bifolio.model.adapters.sites import changed_products, site_of, with_sites
from bifolio.model.file_access import atomic_write
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.model.model_file import Factors
from bifolio.model.weights import prepare
from bifolio.train.head_data import token_sequences
from bifolio.train.head_run import HeadResult, HeadSettings, share_of_rate
from bifolio.train.progress import Progress, make_progress
from bifolio.train.settings import COUNT, check_ranges


@dataclass(frozen=True, slots=True)
class LoraSettings(HeadSettings):
    """Settings of one run."""

    output: str = "adapter"
    learning_rate: float = 2e-3
    rank: int = 8
    sequences: int = 1 << 20  # all of the text

    def __post_init__(self) -> None:
        HeadSettings.__post_init__(self)
        check_ranges(self, {"rank": COUNT})
        if not self.data:
            raise ConfigError("--lora trains on text: pass files or folders with --data")


@dataclass(frozen=True, slots=True)
class Place:
    """One changed part of a product."""

    module: str
    site: int
    column: int
    rows: torch.Tensor  # i64[columns]  of the module's own rows


@dataclass(slots=True)
class LoraRun:
    """The changes, their places, and the model that they change."""

    target: LoadedModel
    settings: LoraSettings
    places: list[Place] = field(init=False)
    downs: dict[str, torch.Tensor] = field(init=False, default_factory=dict)  # by module: [r, in]
    ups: dict[str, torch.Tensor] = field(init=False, default_factory=dict)  # [out, r]
    factors: dict[str, Factors | None] = field(init=False, default_factory=dict)  # in the weights, not in the folder

    def __post_init__(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        self.places = list(_places(self.target, shapes))
        for module, (rows, columns) in shapes.items():
            self.factors[module] = folder_factors(self.target.config, f"{module}.weight")
            self.downs[module] = (torch.randn(self.settings.rank, columns) * columns**-0.5).requires_grad_()
            self.ups[module] = torch.zeros(rows, self.settings.rank).requires_grad_()

    @property
    def scale(self) -> float:
        return 2.0  # lora_alpha / r

    def adapter(self) -> Adapter:
        """The changes as they are now; gradients flow through them."""
        products: dict[int, tuple[LowRank, ...]] = {}
        for place in self.places:
            up = (self.ups[place.module] * self.scale)[place.rows]
            part = LowRank(place.column, self.downs[place.module], up)
            products[place.site] = (*products.get(place.site, ()), part)
        return Adapter(products)

    def parameters(self) -> list[torch.Tensor]:
        return [*self.downs.values(), *self.ups.values()]

    def write(self, folder: Path) -> None:
        """Write the folder of PEFT."""
        tensors = {}
        for module, factors in self.factors.items():
            up = self.ups[module].detach().numpy()
            sides = {"A": self.downs[module].detach().numpy(), "B": up if factors is None else up / factors[:, None]}
            for side, values in sides.items():
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
        rank = self.settings.rank
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(self.target.path),
                  "r": rank, "lora_alpha": self.scale * rank, "lora_dropout": 0.0, "bias": "none",
                  "target_modules": sorted({module.rpartition(".")[2] for module in self.downs})}  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / WEIGHTS, tensors)
        with atomic_write(folder / CONFIG, overwrite=True) as file:
            file.write(json.dumps(config, indent=2).encode())


def _places(target: LoadedModel, shapes: dict[str, tuple[int, ...]]) -> Iterator[Place]:
    """The parts of all products that are changed; `shapes` of their modules are filled in."""
    found: list[Place] = []

    def note(number: int, role: str, linear: Linear) -> Linear:
        column = 0
        for part in linear.parts:
            if isinstance(part, TracedTensor) and len(part.whole) == 2:
                module = part.name.removesuffix(".weight")
                shapes[module] = part.whole
                found.append(Place(module, site_of(number, role), column, torch.from_numpy(part.rows)))
            column += int(part.shape[0])
        return linear

    def keep(experts: Experts) -> Experts:
        return experts

    for number, layer in enumerate(traced_layers(target.config, "hf")):
        if layer.moe is not None:
            raise ConfigError("adapters of mixtures of experts cannot be trained here: choose a dense model")
        changed_products(layer, lambda role, linear, number=number: note(number, role, linear), keep)  # type: ignore[misc]
    yield from found


def train_lora(settings: LoraSettings, progress: Progress | None = None) -> HeadResult:
    """Train an adapter and write its folder."""
    folder = Path(settings.output)
    if (folder / "config.json").exists() or (not settings.force and (folder / CONFIG).exists()):
        raise ConfigError(f"the folder {folder} holds a model or an adapter: pass another --output, or --force")
    target = load_model(settings.target)
    target.check_generates()
    torch.manual_seed(settings.seed)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    progress = progress or make_progress(True)
    try:
        texts = token_sequences(target, settings, progress)
        run = LoraRun(target, settings)
        count = sum(values.numel() for values in run.parameters())
        progress.message(f"text: {texts.size} tokens; an adapter of {count:,} parameters".replace(",", " "))
        losses = _optimise(run, texts, progress)
        run.write(folder)
        progress.message(f"wrote {folder}")
    finally:
        progress.close()
    return HeadResult(folder, len(losses), losses, [])


def _optimise(run: LoraRun, texts: np.ndarray, progress: Progress) -> list[float]:
    """The loss of each step."""
    settings, losses, rng = run.settings, list[float](), np.random.default_rng(run.settings.seed)
    kernels = select_kernels("cpu", name="torch", dtype="f32")
    weights = with_sites(prepare(run.target.weights, kernels))
    optimizer = torch.optim.AdamW(run.parameters(), settings.learning_rate, (0.9, 0.95), weight_decay=0.01)
    began, limit = time.monotonic(), 60 * settings.max_minutes
    for step in range(1, settings.steps + 1):
        seconds = time.monotonic() - began
        done = max(step / settings.steps, seconds / limit if limit else 0.0)
        rate = settings.learning_rate * share_of_rate(step, min(done, 1.0))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = texts[rng.integers(0, len(texts), settings.batch_size)]
        batch = HostBatch.from_runs([], [Run(number, 0, row[:-1]) for number, row in enumerate(rows)], None)
        use = AdapterUse((run.adapter(),), np.zeros(batch.num_tokens, np.int32))
        given = batch.to(kernels)
        logits = transformer.forward(weights, replace(given, adapters=use), kernels, None)
        loss = F.cross_entropy(logits, torch.from_numpy(rows[:, 1:].astype(np.int64)).reshape(-1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        speed = step * batch.num_tokens / max(time.monotonic() - began, 1e-9)
        progress.step(step, settings.steps, losses[-1], rate, speed)
        if limit and seconds > limit:
            progress.message(f"stopped after {settings.max_minutes:g} minutes: --max-minutes sets the limit")
            break
    return losses
