"""lm-eval on an engine of this process: its model class `bifolio`, and certificates of its tasks.

    python -m bifolio.measure.lm_eval_model run --model bifolio --model_args pretrained=smol.gguf --tasks gsm8k

Importing this module registers the class. All requests of a task run in one continuous batch, and each result depends
on its request alone: scores are the same at any batch size, order and cache state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from bifolio.api.llm import LLM
from bifolio.api.outputs import scored_continuation
from bifolio.api.shared_engine import Start
from bifolio.errors import ConfigError, RequestError
from bifolio.measure.evaluation import Certificate, certificate_of, scoring
from bifolio.model.digests import digest_of_facts
from bifolio.sampling_params import SamplingParams

ADAPTER = "lora"  # name of the adapter of `peft`
MAX_GENERATED = 256  # tokens where a task names no number
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")  # further names of a task's options
IGNORED = ("do_sample", "until", "max_gen_toks", "num_beams")  # read before, or without effect on one text
Texts = tuple[str | None, str]  # context and continuation as text


@register_model("bifolio")
class EngineLM(TemplateLM):  # type: ignore[misc]  # the package has no types
    """An engine as lm-eval's model: `pretrained` is a folder, a .gguf file or a name; others are options of `LLM`.

    `peft` is the path of an adapter that answers instead of the model itself.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        llm: LLM | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GENERATED,
        device: str = "auto",
        peft: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = str(batch_size or "auto")
        if not (size.startswith("auto") or size.isdecimal()):
            raise ConfigError(f"batch_size is a number of sequences or auto, not {batch_size!r}")
        if size.isdecimal():
            options.setdefault("max_num_seqs", int(size))
        elif max_batch_size is not None:
            options.setdefault("max_num_seqs", max_batch_size)
        if max_length is not None:
            options.setdefault("max_model_len", max_length)
        device = "auto" if device == "cuda:0" else device  # the harness names it where no device is passed
        if peft is not None:
            options["lora_modules"] = {ADAPTER: peft}
        self.llm = llm or LLM(pretrained, device=device, **options)
        if peft is not None:
            self.llm.lora = ADAPTER
        [self._adapter] = self.llm.adapters_for(None, 1)
        self.max_gen_toks = max_gen_toks
        self._text = self.llm.get_tokenizer()

    # -- texts and tokens ------------------------------------------------------------------------------------------
    @property
    def max_length(self) -> int:
        return self.llm.engine.config.max_model_len

    @property
    def eot_token_id(self) -> int:
        token = self._text.eos_token_id
        if token is None:
            raise ConfigError(f"{self.llm.model.path.name} has no token that ends a text: pass another model")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        begin = self._text.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a rendered chat begins with the token already
            begin = self._text.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        return self._text.encode(string, add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        return self.llm.model.path.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._text.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self._text.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    # -- requests --------------------------------------------------------------------------------------------------
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[Texts, list[int], list[int]]] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1):
                windows.append(((None, ""), *make_disjoint_window(window)))
                owners.append(place)
        totals: list[list[float]] = [[] for _ in requests]
        for place, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[place].append(total)
        return [math.fsum(each) for each in totals]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Texts, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """The logprob of each continuation; of a text that is too long the beginning is cut off."""
        most = self.max_length
        starts = []
        for _, context, continuation in requests:
            tokens, count = [*context, *continuation][-most:], min(len(continuation), most - 1)
            border = len(tokens) - count
            starts.append(scoring(tokens[:border], tokens[border:], self._adapter))
        scores = [scored_continuation(request) for request in self.llm.run_requests(starts)]
        found = [(score.total, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts[0] is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        repeats: Counter[int] = Counter()  # a task that asks for several answers passes a request several times
        starts: list[Start] = []
        for request in requests:
            context, options = request.args
            starts.append(self._generation(self.tok_encode(context), options, repeats[id(request)]))
            repeats[id(request)] += 1
        texts = []
        for request, done in zip(requests, self.llm.run_requests(starts), strict=True):
            if done.error is not None:
                raise RequestError(f"lm-eval's request cannot be answered: {done.error}")
            texts.append(done.sequences[0].text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _generation(self, tokens: list[int], options: Mapping[str, Any], repeat: int) -> Start:
        given = normalize_gen_kwargs(dict(options), self.max_gen_toks)
        unknown = sorted(name for name in given if name not in (*SAMPLING, *IGNORED))
        if unknown:
            raise ConfigError(f"the task has options of generation that this engine has not: {', '.join(unknown)}")
        sampling = {name: given[name] for name in SAMPLING if given.get(name) is not None}
        sampling["seed"] = int(sampling.get("seed", 0)) + repeat
        room = self.max_length - given["max_gen_toks"]
        if room < 1:
            raise ConfigError(
                f"the task asks for {given['max_gen_toks']} tokens and the context has {self.max_length}: pass "
                "max_gen_toks or a larger max_length"
            )
        stops = tuple(text for text in given["until"] if text)
        params = SamplingParams(max_tokens=given["max_gen_toks"], stop=stops, **sampling)
        return lambda engine, name: engine.add_request(name, tokens[-room:], params, adapter=self._adapter)


def certify(llm: LLM, tasks: str, limit: int | None = None) -> Certificate:
    """Evaluate tasks of lm-eval, by name or the path of a .yaml file, and certify the answers."""
    path = Path(tasks)
    if path.suffix == ".yaml" and path.is_file():
        manager, names = TaskManager(include_path=str(path.parent), include_defaults=False), [str(path)]
    else:
        manager, names = TaskManager(), tasks.split(",")
        unknown = [name for name in names if not manager.match_tasks([name])]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is neither a file nor a task of lm-eval: list them with `lm-eval ls`")
    found: Any = simple_evaluate(
        EngineLM(llm=llm), tasks=names, limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    samples = [(name, each) for name, every in sorted(found["samples"].items()) for each in every]
    if not samples:
        raise ConfigError(f"{tasks} has no items")
    facts = sorted(_sample_id(*one) + one[1]["doc_hash"] + one[1]["prompt_hash"] for one in samples)
    score = {
        f"{name}/{metric}": value
        for name, metrics in sorted(found["results"].items())
        for metric, value in sorted(metrics.items())
        if isinstance(value, float) and "_stderr" not in metric
    }
    results = [_sample_result(*one) for one in samples]
    return certificate_of(llm, path.name, digest_of_facts(facts), results, {"metrics": score})


def _sample_id(task: str, sample: Mapping[str, Any]) -> str:
    suffix = "" if sample["filter"] == "none" else f"/{sample['filter']}"
    return f"{task}/{sample['doc_id']}{suffix}"


def _sample_result(task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    """One item of a certificate; it is right where the first metric of its task is 1."""
    filtered = sample["filtered_resps"]
    if isinstance(filtered[0], str):
        answer: Any = filtered[0]
    elif len(filtered) > 1:  # choices: the most likely one
        answer = max(range(len(filtered)), key=lambda place: (filtered[place][0], -place))
    else:
        answer = str(filtered[0])
    value = sample[sample["metrics"][0]]
    is_right = isinstance(value, int | float) and value == 1
    digest = digest_of_facts(_bits(sample["resps"]))
    return {"id": _sample_id(task, sample), "correct": is_right, "answer": answer, "hash": digest}


def _bits(value: Any) -> Any:
    """Responses with every bit of their numbers."""
    if isinstance(value, list | tuple):
        return [_bits(each) for each in value]
    return value.hex() if isinstance(value, float) else value


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
