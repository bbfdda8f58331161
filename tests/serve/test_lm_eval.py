"""lm-eval through the server gives the numbers of lm-eval on transformers, for the same weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from serving import running_server

from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loader import load_model
from bifolio.model.registry import DEFAULT_MODEL, find_model
from bifolio.quant.formats import QuantFormat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STORIES = [
    ("Once upon a time, there was a little", " girl"), ("The cat sat on the", " mat"), ("Tom was very", " happy"),
    ("She put the toys in the", " box"), ("They went to the park to", " play"), ("The sun was", " bright"),
    ("He said, \"I am", " sorry"), ("Mom gave her a big", " hug"), ("The dog ran after the", " ball"),
    ("It was time to go to", " bed"), ("The bird could", " fly"), ("They lived happily ever", " after"),
]  # fmt: skip
CHOICES = [
    ("The girl was sad because she lost her", [" doll", " sky", " quickly"], 0),
    ("Ben likes to eat", [" trains", " apples", " because"], 1),
    ("The fish swims in the", [" water", " bed", " loud"], 0),
    ("At night we look at the", [" breakfast", " moon", " jumped"], 1),
    ("The frog said, \"Let us", [" play", " chair", " yesterday"], 0),
    ("Lily and Tom went to the", [" because", " park", " seven"], 1),
    ("He was so hungry that he", [" ate", " blue", " window"], 0),
    ("The little boat was on the", [" sing", " lake", " happy"], 1),
]  # fmt: skip


def write_tasks(folder: Path) -> None:
    (folder / "stories.jsonl").write_text(
        "".join(json.dumps({"context": context, "continuation": text}) + "\n" for context, text in STORIES)
    )
    (folder / "choices.jsonl").write_text(
        "".join(json.dumps({"question": q, "choices": choices, "answer": a}) + "\n" for q, choices, a in CHOICES)
    )
    source = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
    (folder / "stories.yaml").write_text(
        "task: local_stories\n" + source.format(file=folder / "stories.jsonl") + "output_type: loglikelihood\n"
        'doc_to_text: "{{context}}"\ndoc_to_target: "{{continuation}}"\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n"
        "  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    (folder / "choices.yaml").write_text(
        "task: local_choices\n" + source.format(file=folder / "choices.jsonl") + "output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: acc_norm\n    aggregation: mean\n    higher_is_better: true\n"
    )


def evaluate(tasks: Path, model: str, arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found: Any = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["local_stories", "local_choices"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        batch_size=1,
        device="cpu",
    )
    return found["results"], found["samples"]


def likelihoods(samples: dict[str, Any]) -> list[float]:
    return [
        float(answer[0])
        for task in sorted(samples)
        for sample in sorted(samples[task], key=lambda sample: sample["doc_id"])
        for answer in sample["filtered_resps"]
    ]


def test_lm_eval_gives_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    if find_model(DEFAULT_MODEL) is None:
        pytest.skip("there is no embedded model in this tree")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    folder = tmp_path / "export"
    write_folder(folder, load_model(DEFAULT_MODEL), QuantFormat.F32)
    write_tasks(tmp_path)
    theirs, their_samples = evaluate(tmp_path, "hf", f"pretrained={folder},dtype=float32,add_bos_token=False")
    engine = {"model": str(folder), "max_model_len": 256, "num_blocks": 256}
    with running_server(model_name="export", engine=engine) as server:
        arguments = (
            f"model=export,base_url={server.url}/v1/completions,tokenizer={folder},tokenizer_backend=huggingface,"
            "tokenized_requests=True,num_concurrent=4,max_length=256,add_bos_token=False"
        )
        ours, our_samples = evaluate(tmp_path, "local-completions", arguments)
    assert likelihoods(our_samples) == pytest.approx(likelihoods(their_samples), abs=1e-3)
    for task, numbers in theirs.items():
        for name, value in numbers.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-3, abs=1e-3), (task, name)
