"""Clients of a cluster under load, and the answers that they must get."""

from __future__ import annotations

import threading
import time
from typing import Any

import openai
import psutil
from serving import model_folder

NUM_TOKENS = 120


def texts_of_one_engine(prompts: list[str], engine: dict[str, Any]) -> dict[str, str]:
    """The text of every prompt, from the offline API."""
    from bifolio import LLM, SamplingParams

    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = LLM(model_folder(), **engine).generate(prompts, params, use_tqdm=False)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


def replica_processes(deployment: str) -> list[psutil.Process]:
    """The processes of a deployment's replicas."""
    name = f"ray::ServeReplica:bifolio:{deployment}"
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if " ".join(process.info["cmdline"] or []).startswith(name)]


class Load:
    """Clients that stream all prompts again and again and check every piece of text."""

    def __init__(self, port: int, expected: dict[str, str]) -> None:
        self._port, self._expected, self._prompts = port, expected, list(expected)
        self.whole, self.retryable, self.wrong = 0, 0, []  # type: ignore[var-annotated]
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, index: int) -> None:
        number = index
        while not self._stopped.is_set():
            prompt = self._prompts[number % len(self._prompts)]
            number += 1
            text = ""
            body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
            try:
                for chunk in client_of(self._port).completions.create(model="tiny", prompt=prompt, stream=True, **body):
                    text += chunk.choices[0].text
            except openai.APIStatusError as error:
                self._failed(error.status_code == 503, error)
            except openai.APIError as error:  # an error event in the stream, or a closed connection
                self._failed(error.code == "engine_unavailable", error)
            else:
                if text == self._expected[prompt]:
                    self.whole += 1
                else:
                    self.wrong.append((prompt, text))
            if not self._expected[prompt].startswith(text):
                self.wrong.append((prompt, text))

    def _failed(self, is_retryable: bool, error: Exception) -> None:
        if is_retryable:
            self.retryable += 1
        else:
            self.wrong.append(repr(error))

    def wait_for(self, more: int, seconds: float = 60.0) -> None:
        """Until so many more streams are complete."""
        goal, end = self.whole + more, time.monotonic() + seconds
        while self.whole < goal:
            assert time.monotonic() < end, (self.whole, goal, self.retryable, self.wrong)
            time.sleep(0.05)
