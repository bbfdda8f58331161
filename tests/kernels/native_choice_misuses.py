"""Misuses of the choice of positions, and of attention to them."""

from __future__ import annotations

from native_choice_calls import DIM, HEADS, TOP_K, attended, choice, choosing_shape, floats, given, plain_shape
from native_misuses import misuses

NO_REGISTER = "is register 99 and must be one of the 2 recorded so far"
UNCHOSEN = (
    ("a shape without a choice", {"shape": plain_shape()}, "the shape chooses no positions"),
    ("several heads of keys", {"shape": plain_shape(kv_heads=2).choosing(TOP_K)}, "2 kv heads and must have 1"),
    ("a window", {"shape": plain_shape(window=8).choosing(TOP_K)}, "must have no window"),
    ("both directions", {"shape": choosing_shape().both_ways()}, "not look both ways"),
    ("slopes", {"shape": choosing_shape().with_slopes(floats(HEADS))}, "must have no window, slopes"),
    ("an unknown register", {"query": 99}, NO_REGISTER),
    ("a negative layer", {"layer": -1}, "layer is -1"),
)


def not_chosen() -> dict[str, object]:
    """A register that is neither a choice nor given."""
    arguments = given(query=HEADS * DIM, chosen=TOP_K)
    program = arguments["self"]
    return {"self": program, "query": arguments["query"], "chosen": program.act(arguments["chosen"], 0)}


MISUSES = [
    *misuses(
        "AttentionShape.choosing",
        ("no position", {"top_k": 0}, "top_k is 0"),
        ("too many positions", {"top_k": 2**40}, "top_k is 1099511627776"),
    ),
    *misuses(
        "Program.choose",
        *UNCHOSEN,
        ("an unknown register of weights", {"weights": 99}, NO_REGISTER),
        ("weights of other heads", given(query=HEADS * DIM, weights=HEADS + 1), "weights is 5 wide and must be 4 wide"),
        ("queries of other heads", given(query=HEADS, weights=HEADS), "query is 4 wide and must be 192 wide"),
    ),
    *misuses(
        "Program.attend_chosen",
        *UNCHOSEN,
        ("an unknown choice", {"chosen": 99}, NO_REGISTER),
        ("a choice of another size", given(query=HEADS * DIM, chosen=2), "chosen is 2 wide and must be 3 wide"),
        ("a register of floats", not_chosen(), "must be one that choose or given returned"),
    ),
    *misuses(
        "Program.run",
        ("a position that is not seen", attended(given=[attended()["given"][0], choice(6)]), "chosen.2. is 6"),
        ("a negative position", attended(given=[attended()["given"][0], choice(-1)]), "chosen.2. is -1"),
    ),
]
