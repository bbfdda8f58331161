"""Draft lengths: the best by measured tokens per second, and losses within a small share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bifolio.engine.speculative.drafter import Offer
from bifolio.engine.speculative.policy import CREDIT, EVERY, MEMORY, SHARE, WARM, DraftPolicy

ONE = {0: Offer(4, 0)}


def measured(longest: int = 4, num_sequences: int = 1, seconds: float = 1.0, **options: bool) -> DraftPolicy:
    """A policy that knows the time of plain steps."""
    policy = DraftPolicy(longest, **options)
    for _ in range(WARM + 1):
        policy.collected_plain(num_sequences, seconds)
    return policy


def play(policy: DraftPolicy, num_steps: int, cost: Callable[[int], float], is_right: bool) -> list[int]:
    """The lengths that one sequence plays where drafts are all accepted or all rejected."""
    played = []
    for _ in range(num_steps):
        length = policy.choose(1, ONE, 100).get(0, 0)
        played.append(length)
        if length:
            policy.observe(0, length, length * is_right)
            policy.collected(1, 1, length, cost(length), length * is_right)
        else:
            policy.collected_plain(1, cost(0))
    return played


def test_plain_steps_are_measured_first_and_lengths_are_approached_one_by_one() -> None:
    policy = DraftPolicy(4)
    played = play(policy, 40, lambda length: 1.0 + 0.01 * length, is_right=True)
    assert played[: WARM + 1] == [0] * (WARM + 1)
    assert list(dict.fromkeys(played)) == [0, 1, 2, 4]
    assert played[-1] == 4


def test_plain_steps_are_measured_again_while_drafts_pay() -> None:
    played = play(DraftPolicy(4), 4 * EVERY, lambda length: 1.0 + 0.1 * length, is_right=True)
    assert played.count(0) == 4 * (WARM + 1)


def test_drafts_that_are_rejected_stop_and_are_tried_now_and_then() -> None:
    played = play(DraftPolicy(4), 2000, lambda length: 1.0 + 0.3 * length, is_right=False)
    tried = [number for number, length in enumerate(played) if length and number > EVERY]
    assert 2 <= len(tried) <= 2 * 2000 // EVERY
    assert all(played[number] == 1 for number in tried)
    assert min(np.diff(tried)) >= EVERY // 2


def test_a_trial_lasts_while_its_drafts_are_accepted() -> None:
    policy = measured()
    play(policy, 300, lambda length: 1.0 + 0.2 * length, is_right=False)
    played = play(policy, 300, lambda length: 1.0 + 0.2 * length, is_right=True)
    first = next(number for number, length in enumerate(played) if length)
    assert first <= EVERY + 1
    assert 0 not in played[first : first + EVERY - 1]


def test_a_step_that_was_disturbed_is_forgotten() -> None:
    policy = measured()
    policy.collected_plain(1, 30.0)
    for _ in range(8):
        policy.collected_plain(1, 1.0)
    policy.collected(1, 1, 1, 1.2, 1)
    assert policy._costs[1, 1, 1].value == pytest.approx(1.2, rel=0.05)


def test_a_cold_first_step_does_not_count() -> None:
    policy = DraftPolicy(4)
    for seconds in (90.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        policy.collected_plain(1, seconds)
    policy.collected(1, 1, 1, 1.2, 1)
    assert policy._costs[1, 1, 1].value == pytest.approx(1.2, abs=0.8)


def test_longer_contexts_are_no_cost_of_drafts() -> None:
    """Steps become 40 % longer while drafts pay, plain ones and those with drafts alike."""
    policy, factor = measured(), 1.0
    for number in range(3 * EVERY):
        length = policy.choose(1, ONE, 100).get(0, 0)
        if length:
            policy.observe(0, length, length)
            policy.collected(1, 1, length, factor * (1.0 + 0.1 * length), length)
        else:
            policy.collected_plain(1, factor)
        if number > MEMORY:
            factor *= 1.002
    assert policy._costs[1, 1, 4].value == pytest.approx(1.4, rel=0.1)


def test_batch_sizes_have_costs_of_their_own() -> None:
    policy = measured()
    assert policy.rest(1) == 0
    assert policy.rest(16) == WARM + 1
    assert policy.rest(1) == 0


def test_acceptance_is_kept_by_kind_and_only_the_largest_kind_is_drafted() -> None:
    policy = measured(num_sequences=2)
    for _ in range(50):
        policy.observe(2, 1, 0)
        policy.observe(4, 2, 2)
    policy.collected(2, 1, 1, 1.1, 0)
    policy._idle = 0
    assert set(policy.choose(2, {7: Offer(4, 2), 8: Offer(4, 4)}, 100)) == {8}
    assert policy.choose(2, {7: Offer(4, 2)}, 100) == {}


def test_catching_up_must_pay_for_itself() -> None:
    policy = measured(num_sequences=2)
    for _ in range(20):
        policy.observe(0, 2, 2)
    policy.collected(2, 2, 1, 1.1, 2)
    offers = {7: Offer(4, 0), 8: Offer(4, 0, num_behind=1000)}
    assert set(policy.choose(2, offers, 100, catch_up=0.001)) == {7, 8}
    assert set(policy.choose(2, offers, 100, catch_up=0.1)) == {7}
    assert set(policy.choose(2, offers, 1, catch_up=0.001)) == {7}  # it ends before


def test_one_sequence_reads_its_prompt_before_the_others() -> None:
    policy = measured(num_sequences=2)
    offers = {7: Offer(4, 0, num_behind=50), 8: Offer(4, 0, num_behind=40)}
    assert set(policy.choose(2, offers, 100, catch_up=0.001)) == {8}
    for _ in range(WARM + 1):
        policy.observe(0, 1, 1)
    assert set(policy.choose(2, offers, 100, catch_up=0.001)) == {7, 8}


def test_catching_up_is_a_loss_of_a_trial_and_an_investment_of_drafts_that_pay() -> None:
    trial, proven = measured(), measured()
    for policy in (trial, proven):
        if policy is proven:
            for _ in range(MEMORY):
                policy.observe(0, 1, 1)
        policy.choose(1, {0: Offer(4, 0, num_behind=3)}, 100, catch_up=1.0)
        policy.collected(1, 1, 1, 4.2, 1, behind=3.0)
    assert trial.balance == pytest.approx(CREDIT / 4 + 3 * SHARE + 2 * SHARE + 2 - 1.2 - 3)
    assert proven.balance > trial.balance + 2.9


def test_hidden_states_that_plain_steps_return_are_a_loss_and_no_part_of_their_time() -> None:
    policy = measured()
    balance = policy.balance
    for _ in range(10):
        policy.collected(1, 0, 0, 1.2, 0)
    assert policy._plain[1].value == pytest.approx(1.0)
    assert policy.balance == pytest.approx(balance + 10 * (SHARE - 0.2))


def test_a_trial_waits_until_the_step_that_returns_states_is_affordable_too() -> None:
    """Else states would be read again and again, and the loss would end each trial before it began."""
    policy = measured()
    for _ in range(3):  # states that were read in vain; they cost 0.7 plain steps each
        policy.collected(1, 0, 0, 1.7, 0)
    for _ in range(WARM + 1):
        policy.collected_plain(1, 1.0)
    policy.balance, lost = 0.0, 0
    for _ in range(200):
        if policy.rest(1):
            policy.collected_plain(1, 1.0)
            continue
        policy.collected(1, 0, 0, 1.7, 0)
        lost += 1
        assert policy.balance >= 0.0
        assert policy.choose(1, ONE, 100) == {0: 1}
        break
    assert lost == 1


def test_where_steps_run_ahead_the_first_trial_waits_for_a_full_balance() -> None:
    """A step with drafts waits for the device, and may take as long as many plain ones."""
    policy = measured(is_late=True)
    rest = policy.rest(1)
    assert rest == pytest.approx((CREDIT - 1 - policy.balance) / SHARE, abs=2)
    for _ in range(rest):
        assert policy.choose(1, ONE, 100) == {}
        policy.collected_plain(1, 1.0)
    assert policy.choose(1, ONE, 100) == {0: 1}
    policy.observe(0, 1, 1)
    policy.collected(1, 1, 1, 1.1, 1)
    assert policy.choose(1, ONE, 100) == {0: 2}  # cheaper than feared


def test_a_fixed_length_is_always_played() -> None:
    policy = DraftPolicy(3, adaptive=False)
    assert policy.rest(5) == 0
    assert policy.choose(1, {0: Offer(3, 0), 1: Offer(2, 4)}, 1) == {0: 3, 1: 2}


# -- the law: drafts never cost more than a small share --------------------------------------------------------------


def speed(
    is_right: Callable[[int], bool], row: float, draft: float, hidden: float = 0.0, num_tokens: int = 3000
) -> float:
    """Speed of a simulated sequence in tokens per plain step; a row more costs `row`, a draft token `draft`.

    `is_right` says whether the draft token at a position of the text is accepted; `hidden` is a cost of each step with
    drafts.
    """
    policy = DraftPolicy(4)
    time, position = 0.0, 0
    while position < num_tokens:
        length = policy.choose(1, ONE, 100).get(0, 0)
        right = 0
        while right < length and is_right(position + right):
            right += 1
        seconds = 1.0 + length * (row + draft) + hidden * (length > 0)
        if length:
            policy.observe(0, length, right)
            policy.collected(1, 1, length, seconds, right)
        else:
            policy.collected_plain(1, seconds)
        time += seconds
        position += 1 + right
    return position / time


@pytest.mark.parametrize("row", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("draft", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_no_acceptance_rate_makes_a_run_slower_than_its_share(row: float, draft: float, chance: float) -> None:
    luck = np.random.default_rng(0).random(4000)
    found = speed(lambda n: bool(luck[n] < chance), row, draft)
    assert found > 0.98
    if chance == 1.0 and row + draft < 0.5:
        assert found > 0.9 * 5 / (1 + 4 * (row + draft))


@pytest.mark.parametrize("period", [7, 23, 60, 150, 400])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_text_whose_predictability_changes(period: int, share: float) -> None:
    """Drafts that are right for a while and then wrong for a while mislead every estimate."""
    for row in (0.1, 0.4):
        assert speed(lambda n: n % period < share * period, row, 0.1) > 0.98


@pytest.mark.parametrize("chance", [0.4, 0.6])
@pytest.mark.parametrize("hidden", [0.6, 5.0])
def test_steps_with_drafts_that_are_dearer_than_their_rows(chance: float, hidden: float) -> None:
    luck = np.random.default_rng(0).random(4000)
    assert speed(lambda n: bool(luck[n] < chance), 0.1, 0.05, hidden) > 0.98


def speed_of_requests(chance: float, opening: float, costs: tuple[float, ...], *, is_behind: bool) -> float:
    """Speed of 12 requests of 300 tokens, each of whose first steps with drafts takes `opening` more plain steps.

    `costs`: plain steps of a step with so many drafts. `is_behind`: the drafter tells how long it reads the prompt.
    """
    policy, luck = DraftPolicy(len(costs) - 1), np.random.default_rng(1)
    time, count = 0.0, 0
    for _ in range(12):
        position, has_read = 0, False
        while position < 300:
            offer = Offer(len(costs) - 1, 0, 0 if has_read or not is_behind else 100)
            length = policy.choose(1, {0: offer}, 300 - position, opening / 100).get(0, 0)
            right = 0
            while right < length and luck.random() < chance:
                right += 1
            extra = opening if length and not has_read else 0.0
            if length:
                policy.observe(0, length, right)
                policy.collected(1, 1, length, costs[length] + extra, right, extra if is_behind else 0.0)
            else:
                policy.collected_plain(1, costs[0])
            has_read |= length > 0
            time += costs[length] + extra
            position += 1 + right
            count += 1 + right
    return count / time


@pytest.mark.parametrize("opening", [0.5, 1.2, 3.0])
@pytest.mark.parametrize("is_behind", [False, True])
def test_the_first_step_of_a_request_does_not_end_drafts_that_pay(opening: float, is_behind: bool) -> None:
    """Costs of an EAGLE-3 head on a GPU; the head reads the prompt in the first step with drafts."""
    assert speed_of_requests(0.6, opening, (1.0, 1.28, 1.35, 1.4), is_behind=is_behind) > 1.3
    assert speed_of_requests(0.0, opening, (1.0, 1.28, 1.35, 1.4), is_behind=is_behind) > 0.98


def speed_on_a_device(chance: float, opening: float, states: float) -> float:
    """Speed of 12 requests of 300 tokens where plain steps return no states: one that does comes before drafts.

    It takes `states` plain steps, and the first step of a request with drafts `opening` more than later ones.
    """
    costs = (1.0, 1.28, 1.35, 1.4)
    policy, luck = DraftPolicy(len(costs) - 1), np.random.default_rng(1)
    time, count = 0.0, 0
    for _ in range(12):
        position, has_states, has_read = 0, False, False
        while position < 300:
            seconds, length, right = 1.0, 0, 0
            if policy.rest(1):
                policy.collected_plain(1, seconds)
                has_states = False
            else:
                if has_states:
                    length = policy.choose(1, {0: Offer(len(costs) - 1, 0)}, 300 - position).get(0, 0)
                while right < length and luck.random() < chance:
                    right += 1
                seconds = states if not length else costs[length] + (0.0 if has_read else opening)
                if length:
                    policy.observe(0, length, right)
                    has_read = True
                policy.collected(1, int(length > 0), length, seconds, right)
                has_states = True
            time += seconds
            position += 1 + right
            count += 1 + right
    return count / time


@pytest.mark.parametrize("states", [1.15, 1.7])
@pytest.mark.parametrize("opening", [0.0, 0.5, 1.5])
def test_drafts_that_pay_are_made_although_states_cost_a_step(opening: float, states: float) -> None:
    """Costs of an EAGLE-3 head on an H200."""
    assert speed_on_a_device(0.6, opening, states) > 1.4
    assert speed_on_a_device(0.0, opening, states) > 0.98
