"""The programs of `examples/` do what they say: they choose, search, delegate and guess over branches."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bifolio import LLM, Branch, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "Once upon a time there was a dog."
pytestmark = pytest.mark.full


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=256, num_blocks=128) as found:
        yield found
        assert found.engine.blocks.num_used_blocks == 0


def by_length(branch: Branch) -> float:
    return -len(branch.text)


def test_the_best_answer_is_first(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    found = example("best_of_n").best_of_n(llm, PROMPT, 4, by_length, params)
    assert [score for score, _ in found] == sorted((-len(PROMPT + text) for _, text in found), reverse=True)
    assert len({text for _, text in found}) > 1


def test_beams_go_on_from_the_best_steps(llm: LLM) -> None:
    found = example("beam_with_reward").beam_search(llm, PROMPT, 2, 2, by_length)
    assert len(found) == 2
    assert all(text.startswith(PROMPT) and score == -len(text) for score, text in found)
    assert found[0][0] >= found[1][0]


def test_a_tree_visits_its_best_children_most(llm: LLM) -> None:
    module = example("tree_search")
    root, text = module.search(llm, PROMPT, 12, lambda branch: float("the" in branch.text), width=2, depth=2)
    assert root.visits == 12
    assert sum(child.visits for child in root.children) == 12
    assert all(0 < child.depth <= 2 for child in root.children)
    assert text.startswith(root.branch.text)
    assert len(text) > len(PROMPT)
    module.close(root)


def test_agents_report_to_the_main_branch(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tasks = {"a": " The dog", "b": " The cat"}
    reports, text = example("sub_agents").delegate(llm, PROMPT, tasks, params)
    alone = llm.generate([PROMPT + task for task in tasks.values()], params)
    assert list(reports.values()) == [output.outputs[0].text for output in alone]
    assert text == PROMPT + "".join(task + reports[name] for name, task in tasks.items())


@pytest.mark.parametrize(("result", "was_right"), [(" blue", True), (" red", False)])
def test_a_guess_gives_the_answer_of_the_result(llm: LLM, result: str, was_right: bool) -> None:
    module = example("speculative_tool_call")
    text, found = module.answer(llm, PROMPT, " blue", lambda: result)
    [plain] = llm.generate(PROMPT + result, module.ANSWER)
    assert (text, found) == (PROMPT + result + plain.outputs[0].text, was_right)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rewards_rise_and_logprobs_are_those_of_the_engine(tmp_path: Path) -> None:
    """GRPO with fixed seeds on the embedded model: five updates."""
    module = example("grpo_arithmetic")
    folder = tmp_path / "exact"
    module.write_folder(folder, module.load_model(module.DEFAULT_MODEL), module.QuantFormat.F32)
    with LLM(folder, max_model_len=64, max_num_seqs=32) as llm:
        model = module.LanguageModel.from_pretrained(folder)
        history = module.train(llm, model, 5, 1e-4, lambda number, step: None)
        assert llm.engine.weight_version == 5
    assert all(step.difference == 0.0 for step in history)
    assert history[0].reward < 0.1
    assert history[-1].reward > 0.2
    assert history[-1].accuracy > history[0].accuracy
    module.plot(history, str(tmp_path / "reward.svg"))
    assert "<svg" in (tmp_path / "reward.svg").read_text()


def test_the_rewards_of_answers() -> None:
    module = example("grpo_arithmetic")
    assert len(module.questions()) == 9
    assert module.questions()["Tom had two apples. Mom gave him three more. Now Tom had"] == 5
    assert [module.reward(text, 5) for text in (" five.", " five apples", " four", " a", "")] == [1.0, 1.0, 0.1, 0, 0]


QUICK = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "grpo_arithmetic"]  # it trains for minutes


@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.stem)
def test_every_example_runs_by_itself(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) >= 2
