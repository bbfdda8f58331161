"""Misuses of experts, of products by head, and of attention sinks."""

from __future__ import annotations

from native_calls import (
    EXPERTS,
    HEADS,
    TOKENS,
    WIDTH,
    experts,
    floats,
    heads,
    linear,
    mixed,
    norm,
    recorded,
    routing,
    shape,
)
from native_misuses import NAN, misuses

X, ODD, TAKEN = (getattr(recorded(), name) for name in ("x", "odd", "taken"))
MISUSES = [
    *misuses(
        "AttentionShape.with_sinks",
        ("too few sinks", {"sinks": floats(HEADS - 1)}, "sinks has 3 elements and must have 4"),
    ),
    *misuses("AttentionShape.with_slopes", ("too few slopes", {"slopes": floats(HEADS - 1)}, "slopes has 3 elements")),
    *misuses("AttentionShape.of_chunks", ("no window", {"self": shape()}, "window is 0 and must be at least 1")),
    *misuses("AttentionShape.counting_from", ("a negative start", {"start": -1}, "start is -1")),
    *misuses(
        "Router",
        ("a negative band", {"band": -0.5}, "band is -0.5"),
        ("no experts", {"num_experts": 0}, "num_experts is 0"),
        ("more choices than experts", {"top_k": EXPERTS + 1}, "top_k is 6"),
        ("a NaN scale", {"scale": NAN}, "scale is nan"),
        ("a short bias", {"bias": floats(EXPERTS - 1)}, "bias has 4 elements and must have 5"),
        ("groups of unequal sizes", {"num_groups": 2}, "must be a multiple of num_groups, 2"),
        ("more groups than there are", {"top_groups": 2}, "top_groups is 2"),
        ("a group ranked by none", {"group_best": 0}, "group_best is 0"),
    ),
    *misuses(
        "Experts",
        ("none", {"up": [], "down": []}, "at least one"),
        ("unequally many", {"down": [linear(WIDTH, 48)]}, "up and down must hold as many matrices"),
        ("of unequal sizes", {"up": [linear(96, WIDTH), linear(96, 32)]}, r"up\[1\] is 96 by 32 and must be 96 by 64"),
        ("of a third size", {"up": [linear(72, WIDTH)] * 2}, r"up\[0\] has 72 outputs and must have 96"),
        ("ungated with a gate's activation", {"up": [linear(48, WIDTH)] * 2}, "activation is 4"),
        ("with other outputs", {"down": [linear(WIDTH, 48), linear(32, 48)]}, r"down\[1\] has 32 outputs and must"),
        ("of another kind", {"up": [1, 2]}, "must hold weights made by make_linear"),
        ("an unknown activation", {"activation": 5}, "activation is 5"),
    ),
    *misuses("HostRoom", ("an argument", {"count": 1}, "incompatible", TypeError)),
    *misuses("ExpertCall.run", ("an argument", {"count": 1}, "incompatible", TypeError)),
    *misuses(
        "ExpertCall",
        ("rows without a choice", {"inputs": floats(TOKENS, WIDTH)}, "inputs is 64 wide and must be 64 wide, and"),
        ("an odd width", {"inputs": floats(TOKENS, WIDTH + 3)}, "inputs is 67 wide"),
        ("more choices than experts", {"inputs": floats(TOKENS, WIDTH + 12)}, "the number of experts of a row is 6"),
        ("a row less", {"outputs": floats(TOKENS - 1, WIDTH)}, "outputs has the shape"),
        ("experts of another kind", {"experts": linear(8, 12)}, "incompatible", TypeError),
    ),
    *misuses(
        "Heads",
        ("none", {"linears": []}, "the number of heads is 0"),
        ("of unequal sizes", {"linears": [linear(8, 12), linear(8, 16)]}, r"linears\[1\] is 8 by 16"),
        ("of another kind", {"linears": [norm()]}, "must hold weights made by make_linear"),
    ),
    *misuses(
        "Program.gate",
        ("an unknown register", {"x": 99}, "x is register 99"),
        ("odd logits", {"logits": ODD}, "logits is 33 wide and must divide the 64 columns of x"),
        ("logit rows", {"x": TAKEN}, "one row for each token or both one for each logit row"),
    ),
    *misuses("Program.route", ("wide logits", {"logits": X}, "logits is 64 wide and must be 5 wide")),
    *misuses(
        "Program.mix_experts",
        ("a register of floats", {"routing": X}, "must be one that route or given returned"),
        ("fewer experts", {"experts": experts(EXPERTS - 1)}, "experts holds 4 experts and must hold 5"),
        ("a narrow x", {"x": ODD}, "x is 33 wide and must be 64 wide"),
        ("logit rows", {"x": TAKEN}, "one row for each token or both one for each logit row"),
    ),
    *misuses(
        "Program.head_linear",
        ("columns that are no heads", {"x": ODD}, "must be a multiple of the 4 heads wide"),
        ("a late start", {"start": 5}, "x has 11 columns of a head"),
        ("other heads", {"heads": heads(HEADS + 1)}, "must be a multiple of the 5 heads wide"),
    ),
    *misuses(
        "Program.join_latent",
        ("no rope", {"rope": 0}, "rope is 0"),
        ("an unknown register", {"latent": 99}, "latent is register 99"),
        ("logit rows", {"query": TAKEN}, "must have one for each token"),
        ("another norm", {"norm": norm(12)}, "absorbed is 64 wide and must be a multiple"),
    ),
    *misuses("Program.width", ("an unknown register", {"x": 99}, "x is register 99")),
    *misuses("Program.of_logit_rows", ("an unknown register", {"x": 99}, "x is register 99")),
    *misuses(
        "Program.run",
        ("an unknown expert", mixed(given=[floats(TOKENS, WIDTH), routing(EXPERTS)]), "which lies outside the experts"),
        ("a negative expert", mixed(given=[floats(TOKENS, WIDTH), routing(-1)]), "which lies outside the experts"),
        (
            "too few rows",
            mixed(given=[floats(TOKENS, WIDTH), routing()[:5]]),
            r"given has the shape \(5, 4\)",
        ),
        ("no routing", mixed(given=[floats(TOKENS, WIDTH)]), "given has 1 arrays and must have 2"),
        ("a narrow result", mixed(results=[floats(TOKENS, 32)]), r"results has the shape \(6, 32\)"),
        ("no result", mixed(results=[]), "results has 0 arrays and must have 1"),
    ),
]
