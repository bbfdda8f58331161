"""Vectors of texts by encoders: every engine takes the same texts by its public interface and tokenises them itself.

A request's tokens are numbers of words, so that a text has as many tokens as the request; special tokens are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import Ask, Call, Done, Opening, Unsupported
from benchmarks.engines.bifolio import llm_options

LEAST = 3  # letters of a word
MARK = "▁"  # before pieces that begin a word, in GGUF files


def words_of(pieces: Iterable[str]) -> list[str]:
    """The pieces that are whole words of lower case."""
    plain = (piece.removeprefix(MARK) for piece in pieces)
    return [word for word in plain if len(word) >= LEAST and word.isascii() and word.isalpha() and word.islower()]


class Texts:
    """An engine whose requests are texts; `compute` makes the vectors of all of them."""

    def __init__(self, words: list[str]) -> None:
        if len(words) < 100:
            raise Unsupported("the vocabulary has too few words: vectors are measured with encoders of English texts")
        self._words = words
        self.vocab_size = len(words)

    def compute(self, texts: list[str]) -> Any:
        raise NotImplementedError

    def prepare(self, asks: Sequence[Ask]) -> Call:
        texts = [" ".join(self._words[number] for number in ask.prompt) for ask in asks]

        def call() -> Done:
            found = self.compute(texts)
            return Done([[len(vector)] for vector in found])

        return call

    def reserve(self, sequences: int, length: int) -> None:
        """Sizes are the engine's own defaults."""

    def close(self) -> None:
        """Nothing is held."""


class Bifolio(Texts):
    """`LLM(model).embed(texts)`."""

    def __init__(self, opening: Opening) -> None:
        from bifolio import LLM

        self.llm: Any = LLM(str(opening.model), **llm_options(opening))
        tokenizer = self.llm.model.require_tokenizer()
        super().__init__(words_of(tokenizer.token(number) for number in range(tokenizer.vocab_size)))

    def compute(self, texts: list[str]) -> Any:
        return [result.outputs.data for result in self.llm.embed(texts, use_tqdm=False)]

    def about(self) -> dict[str, str]:
        import bifolio

        return {"bifolio": bifolio.__version__, "kernels": self.llm.engine.runner.kernels.name}

    def close(self) -> None:
        self.llm.close()


class SentenceTransformers(Texts):
    """`SentenceTransformer(model).encode(texts)`."""

    def __init__(self, opening: Opening) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        if opening.threads is not None:
            torch.set_num_threads(opening.threads)
        self._model = SentenceTransformer(str(opening.model), device=opening.device, **opening.options)
        tokenizer = self._model.tokenizer
        super().__init__(words_of(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))

    def compute(self, texts: list[str]) -> Any:
        return self._model.encode(texts, batch_size=len(texts), show_progress_bar=False)

    def about(self) -> dict[str, str]:
        import sentence_transformers
        import torch

        return {"sentence-transformers": sentence_transformers.__version__, "torch": str(torch.__version__)}


class OnnxRuntime(Texts):
    """The folder's ONNX model (`onnx/model.onnx`, or the option `file`), padded batches, and the mean of the states."""

    def __init__(self, opening: Opening) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        path = opening.model / str(opening.options.get("file", "onnx/model.onnx"))
        if not path.is_file():
            raise Unsupported(f"{path} is missing: put an ONNX model of the same weights there")
        options = onnxruntime.SessionOptions()
        if opening.threads is not None:
            options.intra_op_num_threads = opening.threads
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._tokenizer = Tokenizer.from_file(str(opening.model / "tokenizer.json"))
        self._tokenizer.enable_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab()
        super().__init__(words_of(sorted(vocabulary, key=vocabulary.__getitem__)))

    def compute(self, texts: list[str]) -> Any:
        import numpy as np

        encodings = self._tokenizer.encode_batch(texts)
        given = {
            "input_ids": np.array([each.ids for each in encodings]),
            "attention_mask": np.array([each.attention_mask for each in encodings]),
            "token_type_ids": np.array([each.type_ids for each in encodings]),
        }
        states = self._session.run(None, {name: given[name] for name in self._inputs})[0]
        mask = given["attention_mask"][..., None].astype(np.float32)
        vectors = (states * mask).sum(axis=1) / mask.sum(axis=1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def about(self) -> dict[str, str]:
        import onnxruntime

        return {"onnxruntime": onnxruntime.__version__}


class LlamaCpp(Texts):
    """`Llama(file, embedding=True).embed(texts)`, of the GGUF file beside a folder (FOLDER.gguf)."""

    def __init__(self, opening: Opening) -> None:
        import llama_cpp

        path = opening.model if opening.model.suffix == ".gguf" else Path(f"{opening.model}.gguf")
        if not path.is_file():
            raise Unsupported(f"{path} is missing: convert the folder by llama.cpp's converter")
        sizes = {"n_ctx": 64 * 512, "n_batch": 64 * 512, "n_ubatch": 2048}
        self._model = llama_cpp.Llama(
            str(path), embedding=True, verbose=False, n_threads=opening.threads, n_threads_batch=opening.threads,
            **{**sizes, **opening.options},
        )  # fmt: skip
        vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)
        count = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        pieces = (
            llama_cpp.llama_vocab_get_text(vocabulary, number).decode(errors="replace") for number in range(count)
        )
        super().__init__(words_of(piece for piece in pieces if piece.startswith(MARK)))

    def compute(self, texts: list[str]) -> Any:
        return self._model.embed(texts, normalize=True)

    def about(self) -> dict[str, str]:
        import llama_cpp

        return {"llama-cpp-python": llama_cpp.__version__}
