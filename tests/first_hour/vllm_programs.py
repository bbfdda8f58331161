"""Ten programs as users of vLLM write them; only the import is changed before they are run.

Each is a text: `from vllm... import` becomes `from bifolio import`, and MODEL the path of a small model that chats.
"""

from __future__ import annotations

import re

PROGRAMS = {
    "offline_batch": """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=MODEL, dtype="half", gpu_memory_utilization=0.8, tensor_parallel_size=1, max_model_len=128)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [output.prompt for output in outputs] == prompts
""",
    "chat": """
from vllm import LLM

llm = LLM(MODEL, max_model_len=128, trust_remote_code=False)
sampling_params = llm.get_default_sampling_params()
sampling_params.__class__
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
several = llm.chat([conversation for _ in range(3)], sampling_params=sampling_params, use_tqdm=False)
assert len(several) == 3
print(outputs[0].outputs[0].text)
""",
    "chat_template": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_model_len=128)
tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
)
assert text.endswith("assistant:")
ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
assert tokenizer.decode(ids) == text
out = llm.generate(text, SamplingParams(temperature=0, max_tokens=4, stop_token_ids=[tokenizer.eos_token_id]))
print(out[0].outputs[0].token_ids)
""",
    "token_prompts": """
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

llm = LLM(model=MODEL, max_model_len=128, enforce_eager=False)
ids = llm.get_tokenizer().encode("Once upon a time")
output = llm.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(max_tokens=5, min_tokens=5))[0]
assert output.prompt_token_ids == ids
assert len(output.outputs[0].token_ids) == 5
print(output.outputs[0].finish_reason)
""",
    "logprobs": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_model_len=128)
params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
output = llm.generate(["Once upon a time"], params)[0]
completion = output.outputs[0]
for token_id, logprobs in zip(completion.token_ids, completion.logprobs):
    chosen = logprobs[token_id]
    print(token_id, chosen.logprob, chosen.rank, chosen.decoded_token)
    assert chosen.rank == 1
    assert 2 <= len(logprobs) <= 3
assert output.prompt_logprobs[0] is None
for token_id, logprobs in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
    assert logprobs[token_id].logprob <= 0
total = sum(position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs))
assert abs(completion.cumulative_logprob - total) < 1e-4
""",
    "beam_search": """
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=MODEL, max_model_len=128)
params = BeamSearchParams(beam_width=3, max_tokens=6, temperature=0.0, ignore_eos=True)
outputs = llm.beam_search([{"prompt": "Once upon a time"}], params)
for output in outputs:
    assert len(output.sequences) == 3
    for sequence in output.sequences:
        print(sequence.text, sequence.cum_logprob)
        assert sequence.text.startswith("Once upon a time")
        assert len(sequence.tokens) == len(output.prompt_token_ids) + 6
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert scores == sorted(scores, reverse=True)
""",
    "structured_outputs": """
import json
from enum import Enum
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL, max_model_len=200)
choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]), max_tokens=20)
assert llm.generate("Classify: vLLM is wonderful!", choice)[0].outputs[0].text in ("Positive", "Negative")
digits = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"), max_tokens=20)
text = llm.generate("A number:", digits)[0].outputs[0].text
assert len(text) == 3 and text.isdigit()
schema = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False
}
answer = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=60)
print(json.loads(llm.generate("JSON:", answer)[0].outputs[0].text))
""",
    "prefix_caching": """
from vllm import LLM, SamplingParams

prefix = "You are an expert teacher. " * 6
llm = LLM(model=MODEL, enable_prefix_caching=True, max_model_len=256, block_size=16, max_num_batched_tokens=64)
params = SamplingParams(temperature=0.0, max_tokens=4)
first = llm.generate(prefix + "Who are you?", params)[0]
second = llm.generate(prefix + "What is it?", params)[0]
assert first.num_cached_tokens == 0
assert second.num_cached_tokens >= 16
print(second.num_cached_tokens)
""",
    "speculative_and_seed": """
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=1.0, max_tokens=12, n=2, ignore_eos=True)
texts = []
for _ in range(2):
    llm = LLM(
        model=MODEL, seed=7, max_model_len=128, quantization=None, kv_cache_dtype="auto",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    )
    texts.append([o.text for o in llm.generate(["One two one two one two"], params)[0].outputs])
    llm.close()
assert texts[0] == texts[1]
assert texts[0][0] != texts[0][1]
with LLM(model=MODEL, seed=8, max_model_len=128) as other:
    assert [o.text for o in other.generate(["One two one two one two"], params)[0].outputs] != texts[0]
print(texts[0])
""",
    "async_streaming": """
import asyncio
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def stream(engine, prompt, request_id):
    params = SamplingParams(
        max_tokens=10, temperature=0.8, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    pieces, tokens = [], 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        assert output.request_id == request_id
        for completion in output.outputs:
            pieces.append(completion.text)
            tokens += len(completion.token_ids)
        if output.finished:
            break
    assert tokens == 10
    return "".join(pieces)

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, max_model_len=128))
    try:
        texts = await asyncio.gather(*(stream(engine, "The future of AI is", f"stream-{i}") for i in range(3)))
        assert len(set(texts)) == 1
        final = None
        params = SamplingParams(max_tokens=10, temperature=0.8, seed=42, ignore_eos=True)
        async for output in engine.generate("The future of AI is", params, "whole"):
            assert final is None or len(output.outputs[0].text) >= len(final.outputs[0].text)
            final = output
        assert final.finished and final.outputs[0].text == texts[0]
        print(texts[0])
    finally:
        engine.shutdown()

asyncio.run(main())
""",
}


def ported(program: str, model: str) -> str:
    """The program with the import changed and the model named; nothing else."""
    return re.sub(r"from vllm[\w.]* import", "from bifolio import", program).replace("MODEL", repr(model))
