"""Export of a finished run: a Hugging Face-layout folder, optionally a GGUF file, the history and the loss curve."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bifolio.api.language_model import LanguageModel
from bifolio.text.tokenizer import Tokenizer
from bifolio.train.checkpoint import History
from bifolio.train.data import TokenData
from bifolio.train.settings import TrainSettings
from bifolio.train.tokenizer import save_tokenizer


def export(
    folder: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    tokens: TokenData,
    history: History,
    settings: TrainSettings,
) -> list[str]:
    """Write the files; return a message about each for the user."""
    config = model.config
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.bos_token_id}
    model.generation_config = {} if config.bos_token_id is None else dict(ids)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, config.max_position)
    report = _report(model, tokens, history, settings)
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    lines = [f"wrote the model to {folder}"]
    if plot_losses(history, folder / "loss.png"):
        lines.append(f"wrote the loss curve to {folder / 'loss.png'}")
    else:
        lines.append("no loss curve was written: install matplotlib with pip install 'bifolio[plot]'")
    if settings.gguf:
        lines.append(f"wrote {write_gguf_file(folder, settings.gguf)}")
    return lines


def write_gguf_file(folder: Path, format_name: str) -> Path:
    """Write the model of a folder as a GGUF file in the same folder, with matrices in the given format."""
    from bifolio.model.gguf.writer import write_gguf
    from bifolio.model.huggingface.hf_loader import load_folder
    from bifolio.quant.formats import QuantFormat

    path = folder / f"{folder.name}.{format_name}.gguf"
    write_gguf(path, load_folder(folder), QuantFormat[format_name.upper()], overwrite=True)
    return path


def _report(model: LanguageModel, tokens: TokenData, history: History, settings: TrainSettings) -> dict[str, Any]:
    best = history.best
    return {
        "num_parameters": model.config.num_parameters,
        "num_documents": tokens.num_documents,
        "num_train_tokens": len(tokens.train),
        "num_held_out_tokens": len(tokens.held_out),
        "characters_per_token": round(tokens.num_characters / (len(tokens.train) + len(tokens.held_out)), 4),
        "best_held_out_loss": None if best is None else {"step": best[0], "loss": best[1]},
        "final_held_out_loss": history.held_out[-1][1] if history.held_out else None,
        "seconds": round(history.seconds, 1),
        "settings": asdict(settings),
        "history": asdict(history),
    }


def plot_losses(history: History, path: Path, baselines: dict[str, float] | None = None) -> bool:
    """Write a PNG with training and held-out loss; False, with nothing written, if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*history.train, strict=True), label="training", linewidth=0.8) if history.train else None
    axes.plot(*zip(*history.held_out, strict=True), label="held out", marker=".") if history.held_out else None
    for name, loss in (baselines or {}).items():
        axes.axhline(loss, linestyle="--", color="gray", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
