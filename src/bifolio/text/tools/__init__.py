"""Tool calls in the text of an answer: one format per family of models, chosen by the chat template."""

from __future__ import annotations

from functools import lru_cache

from bifolio.text.tools.deepseek import DeepSeek
from bifolio.text.tools.format import ToolFormat
from bifolio.text.tools.gemma import Gemma
from bifolio.text.tools.glm import Glm
from bifolio.text.tools.granite import Granite
from bifolio.text.tools.harmony import Harmony
from bifolio.text.tools.hermes import Hermes
from bifolio.text.tools.kimi import Kimi
from bifolio.text.tools.llama3 import Llama3
from bifolio.text.tools.mistral import Mistral
from bifolio.text.tools.phi import Phi
from bifolio.text.tools.pythonic import Pythonic
from bifolio.text.tools.qwen3_coder import Qwen3Coder

FORMATS: tuple[type[ToolFormat], ...] = (  # the first whose marks are in the template
    Harmony, Gemma, DeepSeek, Kimi, Mistral, Qwen3Coder, Glm, Granite, Phi, Pythonic, Llama3, Hermes,
)  # fmt: skip


@lru_cache(maxsize=16)
def tool_format(template: str | None) -> ToolFormat:
    """The format that a chat template shows to its model; Hermes where it shows none."""
    for kind in FORMATS:
        found = kind.from_template(template or "")
        if found is not None:
            return found
    return Hermes()
