"""fp32: sampled, penalised, constrained and scored answers are those of plain decoding, alone and in one batch.

The reference is plain decoding without overlap scheduling: with it, SGLang counts each token for penalties, and shows
it to custom processors, one step late. Draws are keyed by (seed, position) under deterministic inference.
"""

from __future__ import annotations

import json
import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from engines import STRICT, Reference, at_once, base_flags, ddtree_flags, log_has, request
from structured import PERSON, STRUCTURED, assert_valid, chat, user

# Without the last flag this small model fills what JSON allows between its tokens with spaces.
SHARED = [
    *("--enable-deterministic-inference", "--enable-custom-logit-processor", "--tool-call-parser", "hermes"),
    "--constrained-json-disable-any-whitespace",
]
TOKENS = 24

SAMPLED = [
    {"temperature": 1.0, "sampling_seed": 1},
    {"temperature": 0.7, "sampling_seed": 2},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 3},
    {"temperature": 1.2, "top_k": 20, "sampling_seed": 4},
    {"temperature": 1.0, "top_p": 0.5, "sampling_seed": 5},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "sampling_seed": 6},
    {"temperature": 0.6, "sampling_seed": 2**40 + 7},
    {"temperature": 1.0, "logit_bias": {"198": -100.0, "260": 4.0}, "sampling_seed": 8},
]
PENALISED = [
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.3, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    {"frequency_penalty": 0.5, "temperature": 0.8, "sampling_seed": 11},
    {"repetition_penalty": 1.2, "temperature": 1.0, "top_p": 0.9, "sampling_seed": 12},
]
#: A PNG file of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
EBNF = 'root ::= ("yes" | "no") ", because " [a-z ]{8,24} "."'
CONSTRAINED = [
    {"json_schema": json.dumps(PERSON)},
    {"regex": r"(red|green|blue)( and (red|green|blue)){2}"},
    {"ebnf": EBNF},
    {"json_schema": json.dumps(PERSON), "temperature": 0.9, "sampling_seed": 21},
    {"regex": r"[A-Z][a-z]{2,9}, [0-9]{1,3} years old\.", "temperature": 1.0, "sampling_seed": 22},
]


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    flags = [*base_flags(model), *SHARED, "--disable-overlap-schedule"]
    found = Plain(flags, tmp_path_factory.mktemp("modes") / "plain.log")
    yield found
    found.close()


OVERLAP = [pytest.param((16, []), id="overlap")]
NO_OVERLAP = [pytest.param((7, ["--disable-overlap-schedule"]), id="no overlap, budget 7")]


@pytest.fixture(scope="module", params=[*OVERLAP, *NO_OVERLAP])
def server(request, serve, model):
    budget, flags = request.param
    # The pool leaves room for every request of a batch.
    with serve(f"modes {budget}", [*base_flags(model), *SHARED, *ddtree_flags(budget), *flags], STRICT) as started:
        yield started
        assert started.alive()
        assert not log_has(started, "leak detected")


class Plain(Reference):
    """Plain decoding, asked kind by kind: its seeded draw of a request without filters depends on the batch."""

    def post(self, bodies):
        free = [b for b in bodies if not {"top_p", "top_k"} & set(b["sampling_params"]) and _draws(b)]
        super().post(free)
        super().post([b for b in bodies if not _draws(b)])
        return super().post(bodies)


def _draws(body):
    return body["sampling_params"]["temperature"] != 0


def bodies(questions, kinds, tokens=TOKENS):
    """One request per kind of sampling parameters, each with a question of its own."""
    return [request(q.input_ids, tokens, **kind) for q, kind in zip(questions, kinds, strict=False)]


def assert_same(expected, got, names):
    wrong = []
    for name, want, have in zip(names, expected, got, strict=True):
        a, b = want["output_ids"], have["output_ids"]
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            wrong.append(f"{name} at token {at} of {len(a)}: {a[at : at + 3]} became {b[at : at + 3]}")
        elif want["meta_info"]["finish_reason"] != have["meta_info"]["finish_reason"]:
            wrong.append(f"{name}: {want['meta_info']['finish_reason']} became {have['meta_info']['finish_reason']}")
        elif want["text"] != have["text"]:
            wrong.append(f"{name}: the text differs")
    assert not wrong, f"{len(wrong)} of {len(names)} differ from plain decoding: {'; '.join(wrong)}"


def accepted(answers):
    """Tokens per verify step, all answers together."""
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / steps


#: Under --enable-deterministic-inference no sum depends on how many rows are computed.
CLOSE = 1e-6


def test_seeded_draws(server, plain, questions):
    asked = bodies(questions, SAMPLED)
    got = at_once(server, asked)
    assert_same(plain.post(asked), got, SAMPLED)
    assert accepted(got) > 1.1
    alone = [server.post("/generate", body) for body in asked[:2]]
    assert_same(plain.post(asked[:2]), alone, SAMPLED[:2])


def test_another_seed_gives_another_answer(server, questions):
    kinds = [{"temperature": 1.0, "sampling_seed": seed} for seed in (1, 2, 3, 3)]
    asked = [request(questions[0].input_ids, 24, **kind) for kind in kinds]
    ids = [tuple(answer["output_ids"]) for answer in at_once(server, asked)]
    assert len(set(ids)) == 3
    assert ids[2] == ids[3]


def test_penalties(server, plain, questions):
    asked = bodies(questions, PENALISED, 64)
    expected = plain.post(asked)
    got = at_once(server, asked)
    assert_same(expected, got, PENALISED)
    assert accepted(got) > 1.1
    without = plain.post([request(q.input_ids, 64) for q in questions[:4]])
    assert all(a["output_ids"] != b["output_ids"] for a, b in zip(without, expected[:4], strict=True))


def test_penalties_beside_requests_without_any(server, plain, questions):
    """Rows of the same batch that have other parameters, begin later and end earlier."""
    kinds = [{}, PENALISED[3], {}, PENALISED[0], PENALISED[5], {}, PENALISED[2]]
    asked = [
        request(q.input_ids, tokens, **kind)
        for q, kind, tokens in zip(questions, kinds, (50, 40, 9, 50, 17, 33, 6), strict=False)
    ]
    assert_same(plain.post(asked), at_once(server, asked), kinds)


def test_minimum_of_new_tokens(server, plain, tokenizer):
    """Limits that end inside an accepted path; the model would have stopped before."""
    messages = [{"role": "user", "content": "Say hello."}]
    ids = [int(t) for t in tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
    length = len(plain.post([request(ids, 48)])[0]["output_ids"])
    kinds = [{"min_new_tokens": length + more} for more in range(6)]
    asked = [request(ids, 64, **kind) for kind in kinds]
    got = at_once(server, asked)
    assert_same(plain.post(asked), got, kinds)
    assert all(len(answer["output_ids"]) >= kind["min_new_tokens"] for answer, kind in zip(got, kinds, strict=True))


def test_logit_bias(server, plain, questions):
    kinds = [{"logit_bias": {"28": -100.0}}, {"logit_bias": {"198": 3.0, "30": -4.0}}]
    asked = bodies(questions, kinds)
    assert_same(plain.post(asked), at_once(server, asked), kinds)


def test_several_answers_to_one_prompt(server, plain, questions):
    body = request(questions[3].input_ids, 20, n=3)
    expected = plain.post([request(questions[3].input_ids, 20)])[0]["output_ids"]
    got = server.post("/generate", body)
    assert [answer["output_ids"] for answer in got] == [expected] * 3


def test_grammars(server, plain, questions, tokenizer):
    asked = []
    for text, kind in zip(("a person", "colours", "rain", "a sailor", "a friend"), CONSTRAINED, strict=True):
        messages = [{"role": "user", "content": f"Invent {text}."}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        asked.append(request([int(t) for t in ids], 96, **kind))
    # Beside requests without a grammar.
    free = bodies(questions, [{}, SAMPLED[2]])
    got = at_once(server, asked + free)
    assert_same(plain.post(asked + free), got, [*CONSTRAINED, "free", "free, sampled"])
    for answer, kind in zip(got, CONSTRAINED, strict=False):
        if answer["meta_info"]["finish_reason"]["type"] != "stop":
            continue
        if "json_schema" in kind:
            assert set(json.loads(answer["text"])) == set(PERSON["required"])
        if "regex" in kind:
            assert re.fullmatch(kind["regex"], answer["text"])
    assert sum(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in got[:5]) >= 3


def test_log_probabilities_of_draws(server, plain, questions):
    """Chosen tokens, the best three, the prompt's: as plain decoding reports them, under temperature and penalties."""
    kinds = [{}, SAMPLED[1], SAMPLED[2], PENALISED[4], CONSTRAINED[4]]
    asked = [
        {**body, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
        for body in bodies(questions, kinds, 24)
    ]
    expected, got = plain.post(asked), at_once(server, asked)
    assert_same(expected, got, kinds)
    for kind, want, have in zip(kinds, expected, got, strict=True):
        for name in ("output_token_logprobs", "input_token_logprobs"):
            a, b = ([entry[0] or 0.0 for entry in x["meta_info"][name]] for x in (want, have))
            assert b == pytest.approx(a, abs=CLOSE), (kind, name)
        for a, b in zip(*(x["meta_info"]["output_top_logprobs"] for x in (want, have)), strict=True):
            # Tokens that a grammar forbids all have the same value, in no order.
            shown = [(p, token) for p, token, _ in a if p > -1e4]
            assert [token for _, token, _ in b[: len(shown)]] == [token for _, token in shown], kind
            assert [p for p, _, _ in b[: len(shown)]] == pytest.approx([p for p, _ in shown], abs=CLOSE), kind


def test_a_processor_of_disallowed_tokens(server, plain, questions):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    kinds = [{"temperature": 0}, {"temperature": 0.8, "sampling_seed": 31}]
    asked = [
        {**body, "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
        for body in bodies(questions, [{**k, "custom_params": {"token_ids": [28, 260, 198]}} for k in kinds])
    ]
    free = bodies(questions[2:], [{}, {}])
    got = at_once(server, asked + free)
    assert_same(plain.post(asked + free), got, [*kinds, "free", "free"])
    assert not {28, 260, 198} & {token for answer in got[:2] for token in answer["output_ids"]}


PROCESSOR = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class NotTheLastFour(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            for token in params["__req__"].output_ids[-4:]:
                logits[row, token] = -float("inf")
        return logits
"""


def not_the_last_four():
    """A processor that looks at the answer so far; made so that its code is sent and not the name of this module."""
    namespace = {"__name__": "__main__"}
    exec(PROCESSOR, namespace)
    return namespace["NotTheLastFour"].to_str()


@pytest.mark.parametrize("server", NO_OVERLAP, indirect=True)
def test_a_processor_that_reads_the_answer(server, plain, questions):
    """Without overlap scheduling only: with it SGLang shows such a processor the answer one token late, in plain
    decoding too, so there is nothing exact to compare with."""
    asked = [
        {**body, "custom_logit_processor": not_the_last_four()}
        for body in bodies(questions, [{"custom_params": {}}] * 3)
    ]
    free = bodies(questions[3:], [{}, SAMPLED[0]])
    got = at_once(server, asked + free)
    assert_same(plain.post(asked + free), got, ["1", "2", "3", "free", "free, sampled"])
    for answer in got[:3]:
        ids = answer["output_ids"]
        assert not any(token in ids[max(0, i - 4) : i] for i, token in enumerate(ids))
    # Others are still drafted for.
    assert accepted(got[3:]) > 1.1


@pytest.mark.parametrize("server", OVERLAP, indirect=True)
def test_twenty_structured_answers(server, plain):
    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda body: chat(plain.server(), **body), STRUCTURED))
        got = list(pool.map(lambda body: chat(server, **body), STRUCTURED))
    for body, want, have in zip(STRUCTURED, expected, got, strict=True):
        assert have["message"] == want["message"], body["messages"]
        assert have["finish_reason"] == want["finish_reason"], body["messages"]
        assert_valid(body, have)


def test_log_probabilities_of_chat_completions(server, plain):
    body = {"messages": user("Name three rivers."), "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.4}
    want, have = chat(plain.server(), **body, max_tokens=48), chat(server, **body, max_tokens=48)
    assert have["message"] == want["message"]
    ours, theirs = ([e["logprob"] for e in c["logprobs"]["content"]] for c in (have, want))
    assert ours == pytest.approx(theirs, abs=CLOSE)


@pytest.mark.parametrize("stop", [None, [" river"], ["the", "."]], ids=str)
def test_streamed_pieces_make_the_whole_answer(server, plain, stop):
    body = {"messages": user("Name three rivers of Europe and say where they end."), "stop": stop, "max_tokens": 60}
    whole = chat(server, **body)
    assert whole["message"] == chat(plain.server(), **body)["message"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    pieces = [
        choice
        for chunk in client.chat.completions.create(model="x", temperature=0, stream=True, **body)
        for choice in chunk.choices
    ]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole["message"]["content"]
    assert pieces[-1].finish_reason == whole["finish_reason"]


def _completion(path, **body):
    return f"/v1/{path}", {"model": "x", "temperature": 0, "max_tokens": 40, **body}


def _generate(text, **sampling):
    return "/generate", {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 40, **sampling}}


ENDPOINTS = [
    _completion("completions", prompt="The capital of France is", echo=True, logprobs=1),
    _completion("completions", prompt=["One, two,", "Red, green,"], n=2),
    _completion("chat/completions", messages=user("A city as JSON."), response_format={"type": "json_object"}),
    _generate("The sky", stop_regex="[.!?]", no_stop_trim=True),
    _generate("Dogs and", stop=["."], no_stop_trim=True),
    _generate("Rivers", skip_special_tokens=False, ignore_eos=True),
]


def ends(server, path, body):
    """Texts and finish reasons of a request to any endpoint."""
    reply = server.post(path, body)
    if path == "/generate":
        return reply["text"], reply["meta_info"]["finish_reason"]
    return [(c.get("text"), c.get("message"), c["finish_reason"]) for c in reply["choices"]]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_other_endpoints(server, plain, path, body):
    """Parameters that no other test here uses."""
    assert ends(server, path, body) == ends(plain.server(), path, body)


def test_everything_in_one_batch(server, plain, questions):
    """Every request that is deterministic is what it is alone, whatever runs beside it."""
    kinds = [{}, SAMPLED[0], PENALISED[1], CONSTRAINED[1], SAMPLED[5], {"stop": ["the"]}, PENALISED[5], CONSTRAINED[3]]
    asked = bodies(questions, kinds, 32)
    asked[4] |= {"return_logprob": True}
    # Unseeded draws and a request that ends at once run beside them.
    noise = [request(questions[8].input_ids, 40, temperature=1.0), request(questions[9].input_ids, 1)]
    got = at_once(server, [*asked, *noise])
    assert_same(plain.post(asked), got[: len(asked)], kinds)


def test_unsound_parameters_are_refused(server, questions):
    """With HTTP 400, and the server goes on. SGLang itself ends at min_p under deterministic inference."""
    ids = questions[0].input_ids
    bodies = [request(ids, 4, **s) for s in ({"temperature": -1}, {"top_p": 2}, {"temperature": 1.0, "min_p": 0.2})]
    bodies += [
        {**request(ids, 4), "return_hidden_states": True},
        {**request(ids, 4, top_k=4, temperature=1.0), "return_sampling_mask": True},
    ]
    for body in bodies:
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/generate", body)
        assert refused.value.code == 400, body
    assert server.post("/generate", request(ids, 4))["output_ids"]


def test_what_a_text_model_has_no_answer_to_is_refused(server, questions):
    """Embeddings, and images: HTTP 400, and the server goes on."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PIXEL}}
    bodies = {
        "/v1/embeddings": {"model": "x", "input": "one"},
        "/v1/chat/completions": {
            "model": "x",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}],
        },
    }
    for path, body in bodies.items():
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post(path, body)
        assert refused.value.code == 400, path
    assert server.post("/generate", request(questions[0].input_ids, 4))["output_ids"]
