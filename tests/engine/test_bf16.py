"""bf16: a verify pass of another shape may flip a near-tie, so answers are judged by what they say."""

from __future__ import annotations

from engines import base_flags, ddtree_flags

from sglang_ddtree.bench.lossless import acceptance_length, generate_all


def test_bf16_answers(serve, model, tokenizer, questions):
    flags = [*base_flags(model, "bfloat16"), *ddtree_flags(8), "--max-total-tokens", "4096"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    question = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0}
    with serve("bf16", flags) as server:
        answer = server.post("/v1/chat/completions", question)
        outputs = generate_all(server, questions[:4], 24, 4)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    for output in outputs:
        words = tokenizer.decode(output.ids).split()
        assert len(set(words)) > len(words) // 3, f"repeats itself: {words}"
    assert acceptance_length(outputs) > 1.2
