"""Where the time of requests with images goes on a GPU: the host, the tower kernel by kernel and captured, a crowd.

    python -m benchmarks.tools.gpu_image_profile --models /dev/shm/models      # rows of JSON
    python -m benchmarks.tools.gpu_image_profile --tiny --device torch         # without a GPU: the host alone

The model is that of `gpu_images`.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools.first_token_of_an_image import picture
from benchmarks.tools.gpu_images import MARKS, open_model, print_figures, with_image
from bifolio import LLM, SamplingParams
from bifolio.model.vision.decoding import pixels_of
from bifolio.model.vision.pictures import Pictures
from bifolio.model.vision.prompt import placed

NEW = 32


def median_ms(work: Callable[[int], Any], rounds: int) -> float:
    times = []
    for number in range(rounds):
        began = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(times[1:]), 3)


def of_host(llm: LLM, rounds: int, edge: int) -> dict[str, Any]:
    """Milliseconds of each part of a prompt with an image."""
    import PIL.Image

    vision = llm.model.vision
    assert vision is not None
    files = [picture(edge, 100 + number) for number in range(rounds)]
    images = [PIL.Image.open(io.BytesIO(data)) for data in files]
    pictures, others = Pictures(vision), [PIL.Image.open(io.BytesIO(data)) for data in files]
    found = {
        "decode": median_ms(lambda number: images[number].load(), rounds),
        "pixels": median_ms(lambda number: pixels_of(images[number]), rounds),
        "resize": median_ms(lambda number: vision.picture(np.asarray(images[number])), rounds),
        "new_picture": median_ms(lambda number: pictures.read(images[number]), rounds),
        "known_picture": median_ms(lambda number: pictures.read(images[number]), rounds),
    }
    known = [pictures.read(image) for image in images]
    prompt = f"{MARKS[0]}{known[0].text}{MARKS[1]}"
    tokenizer = llm.model.require_tokenizer()
    ids = tokenizer.encode(prompt)
    found["encode"] = median_ms(lambda number: tokenizer.encode(prompt), rounds)
    found["place"] = median_ms(lambda number: placed(ids, vision, [known[number]]), rounds)
    began = time.perf_counter()
    Pictures(vision).read_all(others)
    found["each_of_several"] = round(1e3 * (time.perf_counter() - began) / rounds, 3)
    return {"row": "host, ms", **found}


def kernels_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds of the wall clock, of the busy device, and of each kernel (name, us, launches)."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if "cuda" in str(event.device_type).lower():
            entry = totals[event.name.replace("void ", "")[:70]]
            entry[0] += event.time_range.elapsed_us()
            entry[1] += 1
    kernels = sorted(((name, round(us), int(count)) for name, (us, count) in totals.items()), key=lambda one: -one[1])
    busy = round(sum(us for us, _ in totals.values()))
    launches = int(sum(count for _, count in totals.values()))
    return {"wall_us": round(1e6 * wall), "busy_us": busy, "launches": launches, "kernels": kernels[:24]}


def of_tower(llm: LLM, edge: int) -> list[dict[str, Any]]:
    reader, vision = llm.engine.runner.images, llm.model.vision
    assert reader is not None
    assert vision is not None
    tiles = [vision.read(picture_of(edge, seed)).tiles[0] for seed in range(4)]
    passes = type(reader.passes)(reader.tower, llm.engine.runner.kernels)
    own = passes._new(*tiles[0].shape[:2])
    towers = llm.engine.runner.kernels.for_towers
    own.launch(towers.from_host(tiles[0]))
    rows = [{"row": "tower, kernel by kernel", **kernels_of(lambda: own.launch(towers.from_host(tiles[1])))}]
    for tile in tiles[:3]:
        passes.rows(tile)
    return [*rows, {"row": "tower, captured", **kernels_of(lambda: passes.rows(tiles[3]))}]


def picture_of(edge: int, seed: int) -> Any:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(picture(edge, seed)))


def of_first_token(llm: LLM, edge: int) -> dict[str, Any]:
    """Functions of the host in ten requests with new images and ten with the same images again, by their own time."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompts = [with_image(5000 + number, edge) for number in range(10)]
    for prompt in prompts:
        pixels_of(prompt["multi_modal_data"]["image"])
    return {"row": "first tokens", "profiles": [profiled(lambda: asked(llm, prompts, params)) for _ in range(2)]}


def asked(llm: LLM, prompts: list[Any], params: SamplingParams) -> None:
    for prompt in prompts:
        llm.generate([prompt], params, use_tqdm=False)


def profiled(work: Callable[[], Any]) -> list[str]:
    profile = cProfile.Profile()
    began = time.perf_counter()
    profile.runcall(work)
    wall = time.perf_counter() - began
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(18)
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    return [f"wall {wall:.3f} s", *(line.replace("/src/bifolio", "") for line in lines[5:])]


def of_crowd(llm: LLM, count: int, edge: int) -> dict[str, Any]:
    """Functions of the host, and kernels, in requests with images of their own that arrive together."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    crowds = [[with_image(7000 + count * turn + number, edge) for number in range(count)] for turn in range(2)]
    found: dict[str, Any] = {"row": "crowd", "requests": count, "new": NEW}
    began = time.perf_counter()
    llm.generate(crowds[0], params, use_tqdm=False)
    found["wall_s"] = round(time.perf_counter() - began, 3)
    return {**found, "profile": profiled(lambda: llm.generate(crowds[1], params, use_tqdm=False))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for the model")
    parser.add_argument("--device", default="cuda", help="cuda, or torch: torch's kernels on the CPU")
    parser.add_argument("--edge", type=int, default=560, help="pixels of an edge of the images")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same architecture")
    parser.add_argument("--figures", action="store_true", help="first the figures of gpu_images")
    parser.add_argument("--no-warm-up", action="store_true", help="capture steps when they come first")
    options = parser.parse_args()
    warm_up = not options.no_warm_up
    with open_model(options.models, options.device, tiny=options.tiny, warm_up=warm_up) as llm:
        if options.figures:
            print_figures(llm, 9, options.edge, tiny=options.tiny)
        print_profile(llm, options.edge, 4 if options.tiny else 64, on_gpu=options.device != "torch")
    return 0


def print_profile(llm: LLM, edge: int, count: int, *, on_gpu: bool) -> None:
    print(json.dumps(of_host(llm, 9, edge)), flush=True)
    for row in of_tower(llm, edge) if on_gpu else ():
        print(json.dumps(row), flush=True)
    print(json.dumps(of_first_token(llm, edge)), flush=True)
    print(json.dumps(of_crowd(llm, count, edge)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
