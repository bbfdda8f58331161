"""Plot of the GPU benchmark: the fraction of its limit that each row reaches.

python -m bifolio.measure.gpu_plot results/gpu.json gpu.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bifolio.measure.gpu import SHAPES

TITLES = {
    "single": "1 sequence",
    "decode": "64 at context 2048",
    "crowd": "256 requests",
    "common_prefix": "64 with a common prefix",
    "beams": "8 x 4 beams",
    "first_token": "prompt of 8192",
    "prompts": "16 prompts of 2048",
}


def plot(found: dict[str, Any], path: Path) -> None:
    """One panel per model, one bar per row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SHAPES), figsize=(13, 4.2), sharey=True)
    for axis, shape in zip(axes, SHAPES, strict=True):
        rows = {row["name"]: row for row in found["rows"] if row["shape"] == shape}
        names = [name for name in TITLES if name in rows and rows[name]["fraction"]]
        for place, name in enumerate(names):
            value = rows[name]["fraction"]
            axis.barh(place, value, 0.6, color="#2b6cb0")
            axis.text(value + 0.01, place, f"{value:.0%}", va="center", fontsize=7)
        axis.set_yticks(range(len(names)), [TITLES[name] for name in names])
        axis.set_xlim(0, 1)
        axis.set_title(shape)
        axis.set_xlabel("fraction of the limit")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="gpu.json of the benchmark")
    parser.add_argument("picture", type=Path, help="the .png, .svg or .pdf file to write")
    arguments = parser.parse_args()
    plot(json.loads(arguments.results.read_text()), arguments.picture)
