"""Convert the folders written by train_models.py to the GGUF files inside the package.

    python scripts/pack_models.py WORK [src/bifolio/models]

Matrices are written in Q8_0, with the sampling defaults and the licence in the metadata.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat

# temperature and top_p, chosen by reading samples of the models
SAMPLING = {
    "stories": {"temperature": 0.7, "top_p": 0.95},
    "stories-draft": {"temperature": 0.7, "top_p": 0.95},
    "shakespeare": {"temperature": 0.8},
}
DESCRIPTIONS = {
    "stories": "Writes simple stories in English.",
    "stories-draft": "Guesses for speculative decoding with the model `stories`.",
    "shakespeare": "Writes characters in the manner of tinyshakespeare.",
}


def main(work: Path, target: Path) -> None:
    for name, sampling in SAMPLING.items():
        model = load_model(work / name)
        model = replace(model, generation_config={**model.generation_config, **sampling})
        extra = {
            "general.author": "the bifolio authors",
            "general.license": "apache-2.0",
            "general.description": DESCRIPTIONS[name],
        }
        report = write_gguf(target / f"{name}.gguf", model, QuantFormat.Q8_0, overwrite=True, extra=extra)
        print(f"{report.path}: {report.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "src/bifolio/models"))
