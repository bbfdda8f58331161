"""Plot the results of `peers_cpu.py --json`: every engine in every format, as a fraction of the machine's limit.

python benchmarks/peers_plot.py q4_0.json q8_0.json bf16.json --out peers.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bifolio.measure.figures import check_target, new_figure, plain_axes

COLOURS = {
    "bifolio": "#1b6ca8",
    "bifolio q8_0 cache": "#6fb1dd",
    "bifolio bf16 cache": "#123f63",
    "llama.cpp": "#c46210",
    "llama.cpp flash": "#e7a977",
    "llama.cpp bf16 keys": "#f2cfae",
    "openvino": "#3f7d4e",
    "openvino paged": "#78b285",
    "openvino paged f32": "#b4d6bc",
    "transformers": "#7a7a7a",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    check_target(arguments.out)
    rows: list[dict[str, Any]] = [row for file in arguments.files for row in json.loads(file.read_text())["rows"]]
    draw(rows, arguments.out)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per workload with a group of bars per format, labelled with tokens per second."""
    workloads = list(dict.fromkeys((row["model"], row["workload"]) for row in rows))
    figure = new_figure(11, 2.2 + 2.6 * ((len(workloads) + 1) // 2))
    panels = figure.subplots((len(workloads) + 1) // 2, 2, squeeze=False).ravel()
    seen: dict[str, Any] = {}
    for axes in list(panels)[len(workloads) :]:
        axes.set_axis_off()
    for axes, (model, workload) in zip(panels, workloads, strict=False):
        chosen = [row for row in rows if (row["model"], row["workload"]) == (model, workload)]
        place, ticks = 0.0, []
        for format in dict.fromkeys(row["format"] for row in chosen):
            group = [row for row in chosen if row["format"] == format]
            ticks.append((place + (len(group) - 1) / 2, format))
            for row in group:
                bar = axes.barh(place, 100 * row["of the limit"], 0.9, color=COLOURS[row["engine"]])
                seen.setdefault(row["engine"], bar)
                axes.text(100 * row["of the limit"] + 0.7, place, f"{row['tokens/s']:.0f}", va="center", fontsize=7)
                place += 1
            place += 0.7
        axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
        axes.invert_yaxis()
        axes.set_xlim(0, 100 * max(1.0, *(1.1 * row["of the limit"] for row in chosen)))
        axes.set_title(f"{model}: {workload}", loc="left", fontsize=10)
        axes.set_xlabel("% of the limit; figures: tokens/s", fontsize=8)
        plain_axes(axes)
    order = [name for name in COLOURS if name in seen]
    figure.legend(
        [seen[name] for name in order], order, loc="outside upper center", ncols=min(len(order), 5), frameon=False
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
