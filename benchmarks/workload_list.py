"""All workloads by name; names are stable."""

from __future__ import annotations

from benchmarks.workloads import (
    MIXED,
    SCHEMA,
    SCORED,
    TOP_P,
    Crowd,
    Decode,
    Prefixed,
    Prompts,
    Samples,
    Start,
    Streams,
    Turns,
    Workload,
)

RATE = "tok/s"
LONG = 16084  # tokens of the long context of a GPU

WORKLOADS: dict[str, Workload] = {
    # for CPUs
    "prefill128": Prompts("prefill 128", "input tok/s", length=128, repeats=3),
    "prefill512": Prompts("prefill 512", "input tok/s", length=512, repeats=3),
    "decode1": Decode("decode, 1 sequence", RATE, context=64, new=64, repeats=3),
    "decode1@4096": Decode("decode, 1 sequence at context 4096", RATE, context=4096, new=24, repeats=3),
    "decode8": Decode("decode, 8 sequences", RATE, count=8, context=64, new=16, repeats=3),
    "decode16": Decode("decode, 16 sequences at context 200", RATE, count=16, context=200, new=16, repeats=3),
    "top_p16": Decode("decode, 16 sequences, top-p 0.95", RATE, count=16, context=200, new=16, repeats=3,
                      options=dict(TOP_P)),
    "crowd16": Crowd("16 requests, in and out 16–128, greedy", RATE, count=16, least=16, most=128),
    "n4": Samples("4 prompts of 128, n = 4, 64 new, top-p", RATE, count=4, length=128, new=64),
    "beams4": Samples("beams: width 4, 4 prompts of 128, 64 new", "s", count=4, length=128, new=64, is_beam=True),
    "prefix16": Prefixed("16 requests, 32 own tokens after 2048 common ones, 32 new", RATE, count=16, prefix=2048,
                         own=32, new=32),
    "grammar16": Crowd("16 requests, every second with a JSON schema", RATE, count=16, least=16, most=128,
                       options=({}, {"schema": SCHEMA})),
    "streams16": Streams("16 streams of 200 tokens", RATE),
    "turn": Turns("next turn of 64 tokens after 4,000", "ms"),
    "edited_turn": Turns("next turn, first half of the last answer left out", "ms", edited=True),
    # vectors of texts
    "text16": Prompts("vector of a text of 16 tokens", "ms", length=16, repeats=9),
    "text64": Prompts("vector of a text of 64 tokens", "ms", length=64, repeats=9),
    "text256": Prompts("vector of a text of 254 tokens", "ms", length=254, repeats=9),
    "texts16": Prompts("vectors of 64 texts of 16 tokens", "input tok/s", count=64, length=16, repeats=5),
    "texts64": Prompts("vectors of 64 texts of 64 tokens", "input tok/s", count=64, length=64, repeats=5),
    "texts256": Prompts("vectors of 64 texts of 254 tokens", "input tok/s", count=64, length=254, repeats=3),
    # for GPUs
    "greedy256": Crowd("256 requests, in and out 100–1024, greedy", RATE),
    "top_p256": Crowd("256 requests, in and out 100–1024, top-p 0.95", RATE, options=(dict(TOP_P),)),
    "scored256": Crowd("256 requests, top-p, penalties, logprobs 5", RATE, options=(dict(SCORED),)),
    "mixed256": Crowd("256 requests, eight sets of options in turns", RATE, options=MIXED),
    "grammar256": Crowd("256 requests, every second with a JSON schema", RATE, options=({}, {"schema": SCHEMA})),
    "n4x64": Samples("64 prompts of 512, n = 4, 256 new, top-p", RATE, count=64),
    "n8x16": Samples("16 prompts of 512, n = 8, 256 new, top-p", RATE, count=16, width=8),
    "beams8": Samples("beams: width 4, 8 prompts of 128, 128 new", "s", count=8, length=128, new=128, is_beam=True),
    "single": Decode("one sequence, prompt 128", "ms/token", context=128, new=256),
    "single@16k": Decode(f"one sequence at context {LONG:,}", "ms/token", context=LONG, new=128),
    "decode64": Decode("64 sequences at context 2048", RATE, count=64, context=2048, new=256),
    "prefix64": Prefixed("64 requests, 64 own tokens after 4096 common ones, 256 new", RATE),
    "prompts16": Prompts("16 prompts of 2048", "input tok/s", count=16, length=2048),
    "prompt8k": Prompts("a prompt of 8,000 tokens", "ms", length=8000),
    "prompt16k": Prompts("a prompt of 16,000 tokens", "ms", length=16000),
    "prompt32k": Prompts("a prompt of 32,000 tokens", "ms", length=32000),
    "continued": Prompts("4,000 tokens after a cached prefix of 28,000", "ms", length=4000, cached=28000),
    "adapters256": Crowd("256 requests over 32 adapters, in and out 100–1024, greedy", RATE,
                         options=tuple({"adapter": number} for number in range(32))),
    "step1": Decode("one sequence", "ms/token", context=64, new=128),
    "step1_a1": Decode("one sequence, one adapter", "ms/token", context=64, new=128, adapters=1),
    "step64": Decode("64 sequences at context 64", RATE, count=64, context=64, new=128),
    "step64_a1": Decode("64 sequences, one adapter", RATE, count=64, context=64, new=128, adapters=1),
    "step64_a8": Decode("64 sequences, 8 adapters", RATE, count=64, context=64, new=128, adapters=8),
    "step64_a64": Decode("64 sequences, 64 adapters", RATE, count=64, context=64, new=128, adapters=64),
    "streams256": Streams("256 streams of 400 tokens", RATE, count=256, new=400),
    # of every engine
    "start": Start("process start to first token", "s"),
    "start_cold": Start("process start to first token, nothing compiled before", "s", cold=True),
    "memory": Start("peak memory of a process with one sequence", "MB"),
}  # fmt: skip
