"""How many tokens are guessed: as many as pay, by what was measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bifolio.engine.speculative.draft_lengths import Acceptance, DraftLengths, Losses, Offer, PassCosts


def costs(seconds: dict[int, float]) -> PassCosts:
    made = PassCosts()
    for rows, value in seconds.items():
        for _ in range(3):
            made.observe(rows, value)
    return made


def accepted(chances: dict[int, float]) -> Acceptance:
    """By kind, at every place; the trials come in a regular order."""
    made = Acceptance()
    for kind, chance in chances.items():
        for trial in range(200):
            made.observe(kind, 1, int(trial * chance) < int((trial + 1) * chance))
    return made


def test_costs_are_interpolated_and_carried_on() -> None:
    made = costs({1: 1.0, 3: 2.0, 8: 2.5})
    assert made.seconds(2) == pytest.approx(1.5)
    assert made.seconds(8) == pytest.approx(2.5)
    assert made.seconds(18) == pytest.approx(3.5)
    assert costs({3: 2.0, 8: 2.5}).seconds(1) == pytest.approx(1.8)


def test_costs_forget_a_disturbed_pass_quickly() -> None:
    made = costs({4: 1.0})
    made.observe(4, 30.0)
    for _ in range(8):
        made.observe(4, 1.0)
    assert made.seconds(4) == pytest.approx(1.0, rel=0.02)


def test_a_cold_first_pass_does_not_count() -> None:
    made = PassCosts()
    made.observe(4, 90.0)
    assert not made.knows(4)
    made.observe(4, 1.0)
    assert made.knows(4)
    assert made.seconds(4) == 1.0


def test_where_more_measurements_are_needed_the_shortest_counts() -> None:
    made = PassCosts(3)
    for seconds in (90.0, 1.0, 40.0):
        assert not made.knows(4)
        made.observe(4, seconds)
    assert made.knows(4)
    assert made.seconds(4) == 1.0


def test_costs_are_carried_over_to_other_contexts() -> None:
    """Each token of context costs as much in passes of all sizes; noise makes some passes longer."""
    made, noise = PassCosts(), np.random.default_rng(0)
    for context in [*range(10, 300, 7)] * 2:
        for rows in (1, 4):
            longer = 1 + 0.02 * noise.random() + (noise.random() < 0.05)
            made.observe(rows, (1.0 + 0.3 * rows + 0.004 * context) * longer, context)
    for context in (10, 100, 290, 400):
        assert made.seconds(1, context) == pytest.approx(1.3 + 0.004 * context, rel=0.08)
        assert made.seconds(4, context) == pytest.approx(2.2 + 0.004 * context, rel=0.08)


def test_a_few_passes_of_about_one_context_say_nothing_about_others() -> None:
    made, noise = PassCosts(), np.random.default_rng(0)
    for context in range(20, 30):
        made.observe(1, 1.0 + 0.05 * noise.random(), context)
    assert made.seconds(1, 200) == pytest.approx(made.seconds(1, 25), rel=0.1)


def test_where_no_draft_can_pay_they_are_considered_again_when_contexts_have_grown() -> None:
    made = DraftLengths(4, steps=costs({1: 1.0, 2: 2.0, 5: 5.0}), acceptance=accepted({3: 0.0}))
    for context, rest in ((0, DraftLengths.REST), (20, DraftLengths.LEAST_REST), (300, 150), (4000, DraftLengths.REST)):
        made.context = context
        assert made.declined(1, [Offer(4, 3)], 100) == (False, rest)


def test_a_pause_after_losses_is_not_shorter_than_its_end() -> None:
    made = DraftLengths(4, steps=costs({1: 1.0, 2: 1.1}), least_pause=64)
    made.losses.add(steps=2.52, tokens=1.0)
    assert 0 < made.losses.pause < 10
    assert made.declined(1, [Offer(4, 3)], 100) == (False, 64)


def test_catching_up_is_a_loss_that_counts() -> None:
    made = DraftLengths(4, drafting=costs({1: 0.1, 41: 4.1}), steps=costs({1: 1.0, 2: 1.1}))
    made.count_loss(1, 2, 5.2, 1, num_behind=40)
    assert made.losses.lost == pytest.approx(3.2)


def test_nothing_is_guessed_before_the_plain_cost_is_known_and_then_step_by_step() -> None:
    made = DraftLengths(6, acceptance=accepted({3: 1.0}))
    assert made.choose(1, [Offer(6, 3)], 100)[0] == {}
    chosen = []
    for rows in (1, 2, 4):
        made.steps.observe(rows, 1.0)
        made.steps.observe(rows, 1.0)
        chosen.append(made.choose(1, [Offer(6, 3)], 100)[0][3])
    assert chosen == [1, 3, 6]


def test_sizes_that_differ_little_are_one() -> None:
    made = PassCosts()
    made.observe(200, 5.0)
    made.observe(203, 1.0)
    assert made.knows(206)
    assert made.seconds(201) == pytest.approx(1.0, rel=0.05)


def test_acceptance_is_kept_by_kind_and_place() -> None:
    made = Acceptance()
    for _ in range(100):
        made.observe(4, 3, 2)
        made.observe(2, 3, 0)
    assert made.chance(4, 0) > 0.9
    assert made.chance(4, 1) > 0.9
    assert made.chance(4, 2) < 0.1
    assert made.chance(2, 0) < 0.1
    assert made.chance(4, 7) == made.chance(4, 2)  # a place that was never reached is like the one before
    assert made.chance(9, 0) == Acceptance.PRIOR


def test_lengths_follow_acceptance_and_cost() -> None:
    offers = [Offer(6, 3)]
    cheap = costs({1: 0.100, 5: 0.104})
    assert DraftLengths(6, steps=cheap, acceptance=accepted({3: 1.0})).choose(1, offers, 100) == ({3: 6}, False)
    assert DraftLengths(6, steps=cheap, acceptance=accepted({3: 0.0})).choose(1, offers, 100) == ({}, False)
    dear = costs({16: 0.016, 80: 0.080})  # every row costs as much as a step
    assert DraftLengths(6, steps=dear, acceptance=accepted({3: 0.7})).choose(16, offers * 16, 100)[0] == {}


def test_only_the_kinds_that_pay_are_taken() -> None:
    steps = costs({1: 1.0, 2: 1.0, 4: 1.0, 6: 1.4, 12: 2.0})
    made = DraftLengths(4, steps=steps, acceptance=accepted({2: 0.1, 4: 0.9}))
    lengths, _ = made.choose(2, [Offer(4, 2), Offer(4, 4)], 100)
    assert lengths.get(4, 0) >= 2
    assert lengths.get(2, 0) == 0


def test_a_draft_model_as_slow_as_the_model_is_never_run() -> None:
    steps = costs({1: 1.0, 5: 1.05})
    made = DraftLengths(4, drafting=PassCosts(), relative_cost=1.0, steps=steps, acceptance=accepted({0: 1.0}))
    for _ in range(500):
        assert made.choose(1, [Offer(4, 0)], 100)[0] == {}
        assert made.declined(1, [Offer(4, 0)], 100) == (False, DraftLengths.REST)


def test_catching_up_must_pay_for_itself() -> None:
    steps, drafting = costs({1: 1.0, 2: 1.0, 5: 1.1}), costs({1: 0.1, 100: 10.0})
    made = DraftLengths(4, drafting=drafting, steps=steps, acceptance=accepted({0: 0.9}))
    assert made.choose(1, [Offer(4, 0, num_behind=100)], 100) == ({0: 4}, True)
    assert made.choose(1, [Offer(4, 0, num_behind=100)], 10) == ({}, False)  # it ends before
    ready_and_behind = [Offer(4, 0), Offer(4, 0, num_behind=2000)]
    lengths, all_join = made.choose(2, ready_and_behind, 100)
    assert lengths
    assert not all_join


def test_a_probe_comes_after_a_pause_where_there_is_hope() -> None:
    offers = [Offer(4, 3)]
    made = DraftLengths(4, steps=costs({1: 1.0, 2: 1.1, 5: 1.3}), acceptance=accepted({3: 0.0}))
    answers = []
    for _ in range(3 * DraftLengths.PROBE_EVERY + 2):
        assert made.choose(1, offers, 100)[0] == {}
        answers.append(made.declined(1, offers, 100))
    assert answers.count((True, 0)) == 2  # the second after twice as many steps
    assert answers.count((False, 0)) == 3 * DraftLengths.PROBE_EVERY
    hopeless = DraftLengths(4, steps=costs({1: 1.0, 2: 2.0, 5: 5.0}), acceptance=accepted({3: 0.0}))
    assert hopeless.declined(1, offers, 100) == (False, DraftLengths.REST)


def ahead(plain: float, num_sequences: int) -> DraftLengths:
    """A device whose plain steps run ahead of the host and take `plain` seconds."""
    steps = costs({num_sequences: plain})
    return DraftLengths(3, drafting=PassCosts(), relative_cost=0.1, steps=steps, late_steps=PassCosts())


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_short_steps_that_run_ahead_are_not_given_up_for_drafts(num_sequences: int) -> None:
    """A step with drafts waits for the device: where a plain one takes less than that, none is tried."""
    offers = [Offer(3, 0)] * num_sequences
    short, long = ahead(0.0004, num_sequences), ahead(0.005, num_sequences)
    assert short.choose(num_sequences, offers, 100)[0] == {}
    assert short.declined(num_sequences, offers, 100) == (False, DraftLengths.REST)
    assert long.choose(num_sequences, offers, 100)[0] != {}
    assert not short.can_pay(num_sequences)
    assert long.can_pay(num_sequences)
    assert short.can_pay(3 * num_sequences)  # their cost is not known yet


def test_measured_steps_with_drafts_replace_the_assumption_and_leave_plain_costs_alone() -> None:
    made = ahead(0.004, 4)
    offers = [Offer(3, 0)] * 4
    assert made.choose(4, offers, 100)[0] != {}
    for _ in range(3):
        made.observe_step(8, 0.02, has_drafts=True)
    assert made.choose(4, offers, 100)[0] == {}
    assert made.steps.seconds(8) < 0.0045
    for _ in range(20):
        made.observe_step(8, 0.0042, has_drafts=True)
    assert made.choose(4, offers, 100)[0] != {}


def test_before_the_plain_cost_is_known_there_is_no_rest() -> None:
    assert DraftLengths(4).declined(1, [Offer(4, 3)], 100) == (False, 0)


# -- the law: drafts never cost more than a small share --------------------------------------------------------------


def test_losses_stop_drafts_until_they_are_a_small_share() -> None:
    losses = Losses()
    assert losses.pause == 0
    losses.add(steps=4.0, tokens=1.0)
    pause = losses.pause
    assert 50 < pause < 200
    losses.count(pause)
    assert losses.pause == 0
    losses.add(steps=1.0, tokens=3.0)
    assert losses.lost < 3.0


def test_gains_do_not_pay_for_later_losses() -> None:
    losses = Losses()
    for _ in range(1000):
        losses.count(1)
        losses.add(steps=1.0, tokens=4.0)
    assert losses.lost == 0.0
    losses.add(steps=10.0, tokens=1.0)
    assert losses.pause > 0


def speed(
    is_right: Callable[[int], bool], row: float, draft: float, hidden: float = 0.0, num_tokens: int = 3000
) -> float:
    """Speed of a simulated sequence in tokens per plain step; a row more costs `row`, a draft token `draft`.

    `is_right` says whether the draft token at a position of the text is accepted. Estimates contain all costs but
    `hidden`, that of a step with drafts.
    """
    made = DraftLengths(4, drafting=PassCosts(), steps=costs({n: 1.0 + row * (n - 1) for n in range(1, 9)}))
    made.drafting = costs({1: draft, 8: draft})
    time = position = 0.0
    rest = 0
    while position < num_tokens:
        made.losses.count(1)
        offers, length = [Offer(4, 0)], 0
        if rest:
            rest -= 1
        else:
            lengths, _ = made.choose(1, offers, 100)
            length = lengths.get(0, 0)
            if not length:
                probe, rest = made.declined(1, offers, 100)
                length = int(probe)
        right = 0
        while right < length and is_right(int(position) + right):
            right += 1
        seconds = 1.0 + length * (row + draft) + hidden * (length > 0)
        if length:
            made.acceptance.observe(0, length, right)
            made.count_loss(1, 1 + length, seconds, right)
        time += seconds
        position += 1 + right
    return position / time


@pytest.mark.parametrize("row", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("draft", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_no_acceptance_rate_makes_a_run_slower_than_its_share(row: float, draft: float, chance: float) -> None:
    found = speed(lambda n: bool(np.random.default_rng(n).random() < chance), row, draft)
    assert found > 0.97
    if chance == 1.0 and row + draft < 0.5:
        assert found > 0.9 * 5 / (1 + 4 * (row + draft))


@pytest.mark.parametrize("period", [7, 23, 60, 150, 400])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_text_whose_predictability_changes(period: int, share: float) -> None:
    """Drafts that are right for a while and then wrong for a while mislead every estimate."""
    for row in (0.1, 0.4):
        assert speed(lambda n: n % period < share * period, row, 0.1) > 0.97


@pytest.mark.parametrize("chance", [0.4, 0.6])
def test_costs_that_the_estimates_do_not_contain(chance: float) -> None:
    found = speed(lambda n: bool(np.random.default_rng(n).random() < chance), 0.1, 0.05, hidden=0.6)
    assert found > 0.97
