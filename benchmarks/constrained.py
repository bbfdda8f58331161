"""Requests with a JSON schema beside requests without one, relative to the same requests without any schema.

    python benchmarks/constrained.py --model FOLDER --device cuda [--requests 256] [--longest 1024] [--passes 2]

Every pass runs the same lengths twice with new prompts: no request has a schema, then every second one has. The rates
of the requests without a schema are their tokens divided by the time until the last of them has finished. FOLDER needs
weights and a configuration; its tokenizer is replaced by one of bytes and made-up words, in which JSON can be written.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "text": {"type": "string"},
    },
    "required": ["title", "year", "tags", "text"],
    "additionalProperties": False,
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A vocabulary of two special tokens, all bytes, and words of letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    draws = random.Random(0)
    tokens = {"<s>": 0, "</s>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        tokens[symbol] = len(tokens)
    while len(tokens) < vocab_size:
        word = "".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(2, 9)))
        tokens.setdefault(("\u0120" if draws.random() < 0.5 else "") + word, len(tokens))
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def copy_with_tokenizer(model: Path, folder: Path) -> int:
    """Link the model's files into a folder with the new tokenizer; return the size of the vocabulary."""
    for path in model.iterdir():
        if not path.name.startswith(("tokenizer", "config.json")):
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 0, "eos_token_id": 1}))
    vocab_size = int(config["vocab_size"])
    write_tokenizer(folder, vocab_size)
    return vocab_size


class Bench:
    """Runs the requests of one pass with any share of schemas."""

    def __init__(self, llm: Any, vocab_size: int) -> None:
        self._llm, self._vocab_size, self._random = llm, vocab_size, random.Random(0)

    def run(self, lengths: list[tuple[int, int]], has_schema: bool) -> dict[str, float]:
        """Tokens per second of all requests, and of those that never have a schema."""
        from bifolio import Grammar, SamplingParams

        grammar = Grammar.json_schema(SCHEMA)
        prompts = [[self._random.randrange(300, self._vocab_size) for _ in range(length)] for length, _ in lengths]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=count,
                ignore_eos=True,
                grammar=grammar if has_schema and index % 2 else None,
            )
            for index, (_, count) in enumerate(lengths)
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        last = max(output.metrics.finished for output in outputs[::2]) - start
        found = {"tok/s": sum(counts) / seconds, "free tok/s": sum(counts[::2]) / last, "tokens": float(sum(counts))}
        if has_schema:
            found["bounded share"] = sum(counts[1::2]) / sum(counts)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with weights and configuration")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--longest", type=int, default=1024, help="tokens of the longest prompt and of the longest answer"
    )
    parser.add_argument("--passes", type=int, default=2)
    arguments = parser.parse_args()
    from bifolio import LLM

    with tempfile.TemporaryDirectory() as name:
        vocab_size = copy_with_tokenizer(arguments.model, Path(name))
        longest = arguments.longest
        llm = LLM(name, device=arguments.device, max_model_len=2 * longest + 64, max_num_seqs=arguments.requests)
        bench, draws, least = Bench(llm, vocab_size), random.Random(1), max(1, longest // 10)
        for number in range(arguments.passes):
            lengths = [
                (draws.randint(least, longest), draws.randint(least, longest)) for _ in range(arguments.requests)
            ]
            free, mixed = bench.run(lengths, False), bench.run(lengths, True)
            ratios = {f"{key} ratio": mixed[key] / free[key] for key in ("tok/s", "free tok/s")}
            report = {"pass": number, "without": free, "half with a schema": mixed, **ratios}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
