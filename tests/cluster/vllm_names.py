"""A stand-in for the names that `ray.serve.llm` imports: of vLLM, models of requests and answers that take any field;
of pyarrow, file systems of clouds, which no test uses."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OPEN_MODEL = """from pydantic import BaseModel, ConfigDict

class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
"""
ERRORS = """
class ErrorInfo(Open):
    message: str
    type: str
    param: str | None = None
    code: int

class ErrorResponse(Open):
    error: ErrorInfo
"""
ANY_CLASS = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
NAMES = {
    "openai.chat_completion.protocol": ("ChatCompletionRequest", "ChatCompletionResponse",
                                        "ChatCompletionStreamResponse"),
    "openai.completion.protocol": ("CompletionRequest", "CompletionResponse", "CompletionStreamResponse"),
    "pooling.embed.protocol": ("EmbeddingChatRequest", "EmbeddingCompletionRequest", "EmbeddingResponse"),
    "pooling.scoring.protocol": ("ScoreResponse", "ScoreTextRequest"),
    "serve.engine.protocol": (),
    "serve.tokenize.protocol": ("DetokenizeRequest", "DetokenizeResponse", "TokenizeChatRequest",
                                "TokenizeCompletionRequest", "TokenizeResponse"),
    "speech_to_text.transcription.protocol": ("TranscriptionRequest", "TranscriptionResponse",
                                              "TranscriptionStreamResponse"),
}  # fmt: skip


def write_names(folder: Path) -> Path:
    """Write packages with these names to a folder, which belongs on the path of modules then."""
    for module, names in NAMES.items():
        *packages, file = ("vllm", "entrypoints", *module.split("."))
        for depth in range(1, len(packages) + 1):
            package = folder.joinpath(*packages[:depth])
            package.mkdir(exist_ok=True)
            (package / "__init__.py").touch()
        classes = "".join(f"\nclass {name}(Open):\n    pass\n" for name in names)
        is_errors = module == "serve.engine.protocol"
        folder.joinpath(*packages, f"{file}.py").write_text(OPEN_MODEL + (ERRORS if is_errors else classes))
    if find_spec("pyarrow") is None:
        (folder / "pyarrow").mkdir()
        for name in ("__init__", "fs", "json", "dataset", "parquet"):
            (folder / "pyarrow" / f"{name}.py").write_text(ANY_CLASS)
    return folder
