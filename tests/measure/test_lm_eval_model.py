"""lm-eval's class `bifolio` gives the numbers of lm-eval's own on transformers, in every batch, and certifies tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from adapter_files import adapter_folder
from bifolio import LLM
from bifolio.errors import ConfigError
from bifolio.measure.evaluation import verify
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loader import load_model
from bifolio.model.registry import DEFAULT_MODEL, find_model
from bifolio.quant.formats import QuantFormat
from helpers import cpu_kernel_names

MISSING = [name for name in ("lm_eval", "datasets") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"packages are not installed: {MISSING}"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_model(DEFAULT_MODEL) is None, reason="there is no embedded model in this tree"),
    pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels"),
]

STORIES = (
    "Once upon a time, there was a little girl named Lily. She liked to play in the park with her red ball.",
    "Tom and his mom went to the big shop. They wanted to buy a new toy for his little sister.",
    "One day, a small bird could not fly. It was very sad and sat under a tall tree all day long.",
)
CHOICES = (
    ("Ben likes to eat", (" trains", " apples", " because"), 1), ("The fish swims in the", (" water", " bed"), 0),
    ("At night we look at the", (" breakfast", " moon", " jumped"), 1), ("He was so hungry he", (" ate", " blue"), 0),
)  # fmt: skip
SOURCE = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
TASKS = {
    "choices": (
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: answer\ntarget_delimiter: ""\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n'
    ),
    "rolling": (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n"
    ),
    "generated": (
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{text}}"\n'
        'generation_kwargs:\n  until: ["."]\n  max_gen_toks: 20\n  do_sample: false\n'
        "metric_list:\n  - metric: exact_match\n"
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    questions = [{"question": q, "choices": list(choices), "answer": a} for q, choices, a in CHOICES]
    texts = [{"text": text} for text in STORIES]
    for name, task in TASKS.items():
        lines = questions if name == "choices" else texts
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        source = SOURCE.format(file=folder / f"{name}.jsonl")
        (folder / f"{name}.yaml").write_text(f"task: local_{name}\n{source}{task}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in float32, for transformers too."""
    path = tmp_path_factory.mktemp("export") / "stories"
    write_folder(path, load_model(DEFAULT_MODEL), QuantFormat.F32)
    return path


def evaluate(tasks: Path, model: str, **arguments: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import bifolio.measure.lm_eval_model  # noqa: F401  # registers the class

    size = arguments.pop("batch_size", 1)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model, arguments, [f"local_{name}" for name in TASKS], batch_size=size, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    return found


def responses(found: dict[str, Any], name: str) -> list[Any]:
    return [sample["resps"] for sample in sorted(found["samples"][f"local_{name}"], key=lambda one: one["doc_id"])]


def test_an_adapter_answers_as_in_transformers(tasks: Path, folder: Path) -> None:
    adapter = str(adapter_folder(folder))
    theirs, plain = (
        evaluate(tasks, "hf", pretrained=str(folder), dtype="float32", device="cpu", **given)
        for given in ({"peft": adapter}, {})
    )
    ours = evaluate(tasks, "bifolio", pretrained=str(folder), peft=adapter)
    assert responses(ours, "generated") == responses(theirs, "generated") != responses(plain, "generated")


def test_the_numbers_are_those_of_transformers_in_every_batch(tasks: Path, folder: Path) -> None:
    theirs = evaluate(tasks, "hf", pretrained=str(folder), dtype="float32", device="cpu")
    alone = evaluate(tasks, "bifolio", pretrained=str(folder), max_num_seqs=1)
    crowded = evaluate(tasks, "bifolio", pretrained=str(folder), batch_size=16, num_blocks=40, chunk_size=8)
    assert responses(alone, "generated") == responses(theirs, "generated")
    for name in TASKS:
        assert responses(alone, name) == responses(crowded, name)  # to the last bit
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert alone["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)


def test_a_certificate_of_a_task(tasks: Path) -> None:
    from bifolio.measure.lm_eval_model import certify

    task = str(tasks / "choices.yaml")
    first = certify(LLM(max_num_seqs=1, max_model_len=64), task)
    verify(certify(LLM(max_num_seqs=16, max_model_len=64, chunk_size=8), task), first)
    assert first["task"]["items"] == len(CHOICES)
    assert first["score"]["metrics"]["local_choices/acc,none"] == first["score"]["accuracy"] > 0.5
    assert certify(LLM(max_model_len=64), task, limit=2)["items"] == first["items"][:2]
    with pytest.raises(ConfigError, match="neither a file nor a task"):
        certify(LLM(max_model_len=64), "no_such_task_at_all")


def test_several_samples_and_long_contexts() -> None:
    from lm_eval.api.instance import Instance

    from bifolio.measure.lm_eval_model import EngineLM

    model = EngineLM(max_model_len=48, batch_size="auto")
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, "until": []}
    request = Instance("generate_until", {}, ("Once upon a time " * 30, options), 0)
    first, second = model.generate_until([request, request])
    assert first != second  # repeats have seeds of their own
    assert model.generate_until([request, request]) == [first, second]
    [(logprob, _)] = model.loglikelihood([Instance("loglikelihood", {}, ("Once upon " * 40, " a time"), 0)])
    tokens = model.tok_encode("Once upon " * 40 + " a time")
    context = len(model.tok_encode(("Once upon " * 40).rstrip()))
    with model.llm.open(tokens[-48:context]) as branch:
        assert branch.score([tokens[context:]])[0].total == logprob
    with pytest.raises(ConfigError, match="colour"):
        model.generate_until([Instance("generate_until", {}, ("Once", {"colour": 1}), 0)])
    with pytest.raises(ConfigError, match="max_gen_toks"):
        model.generate_until([Instance("generate_until", {}, ("Once", {"max_gen_toks": 48}), 0)])
    with pytest.raises(ConfigError, match="number of sequences"):
        EngineLM(batch_size="many")


def test_the_harness_and_the_verb(tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bifolio.measure.lm_eval_model", "run", "--model", "bifolio", "--model_args",
               "max_model_len=64", "--include_path", str(tasks), "--tasks", "local_choices"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|local_choices|" in done.stdout
    one = str(tmp_path / "one.json")
    verb = [sys.executable, "-m", "bifolio", "eval", "--task", str(tasks / "choices.yaml")]
    written = subprocess.run([*verb, "--certificate", one], capture_output=True, text=True, timeout=300, check=False)
    assert written.returncode == 0, written.stderr[-2000:]
    assert "local_choices/acc,none: " in written.stdout
    again = subprocess.run([*verb, "--verify", one], capture_output=True, text=True, timeout=300, check=False)
    assert "verified" in again.stdout, again.stderr[-2000:]
