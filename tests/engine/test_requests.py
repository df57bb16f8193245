"""One DDTREE server, requests of every kind: each ends where plain decoding ends, and nothing is lost or left over."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
import urllib.request

import pytest
from engines import STRICT, assert_equal, at_once, base_flags, ddtree_flags, log_has, request, wait_until

from sglang_ddtree.bench.lossless import Question, as_output, flush_cache

SHORT = (
    "What is the capital of France?",
    "Name three colours, separated by commas.",
    "What is 2 + 2?",
    "Say hello.",
)


@pytest.fixture(scope="module")
def server(serve, model):
    flags = [*base_flags(model), *ddtree_flags(16), "--max-total-tokens", "8192"]
    with serve("requests", flags, STRICT) as started:
        yield started


@pytest.fixture(scope="module")
def short(tokenizer):
    """Prompts that the model answers in a few words and then ends."""
    asked = []
    for text in SHORT:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        asked.append(Question(text, [int(token) for token in ids]))
    return asked


def compare(server, reference, cases):
    """All ``cases`` (question, tokens, sampling) at once; each must be what plain decoding gives for it alone."""
    bodies = [request(question.input_ids, tokens, **sampling) for question, tokens, sampling in cases]
    expected = reference.post(bodies)
    got = at_once(server, bodies)
    names = [Question(f"{question.id} {tokens} {sampling}", []) for question, tokens, sampling in cases]
    assert_equal(names, [as_output(answer) for answer in expected], [as_output(answer) for answer in got])
    assert [answer["text"] for answer in got] == [answer["text"] for answer in expected]
    counts = [answer["meta_info"]["completion_tokens"] for answer in expected]
    assert [answer["meta_info"]["completion_tokens"] for answer in got] == counts
    return got


def test_end_of_sequence(server, reference, short):
    got = compare(server, reference, [(question, 48, {}) for question in short])
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in got)


def test_end_of_sequence_ignored(server, reference, short):
    got = compare(server, reference, [(question, 32, {"ignore_eos": True}) for question in short[:3]])
    assert all(len(answer["output_ids"]) == 32 for answer in got)


@pytest.mark.parametrize("first", [1, 7], ids=["1 to 6", "7 to 12"])
def test_max_tokens(server, reference, questions, first):
    """Limits that fall on every place of an accepted path."""
    cases = [(questions[1], tokens, {}) for tokens in range(first, first + 6)]
    got = compare(server, reference, cases)
    assert [len(answer["output_ids"]) for answer in got] == [tokens for _, tokens, _ in cases]


def test_stop_strings(server, reference, questions, tokenizer):
    """A word of plain decoding's own answer as the stop string: whole, cut out of its middle, or over two tokens."""
    cases = []
    for question, answer in zip(questions[:4], reference.answers(questions[:4], 48), strict=True):
        ids = answer.ids
        words = [word for word in tokenizer.decode(ids).split() if len(word) > 3]
        middle = words[len(words) // 2]
        cases += [(question, 48, {"stop": [middle]}), (question, 48, {"stop": [middle[1:-1], words[-1]]})]
        over_two = tokenizer.decode(ids[9:11])
        cases.append((question, 48, {"stop": [words[-1], over_two[1:-1] or over_two]}))
    got = compare(server, reference, cases)
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in got)


def test_a_stop_string_behind_the_end_of_sequence(server, reference, short, tokenizer):
    """One verify step may accept the end of the answer and the stop string after it; plain decoding sees the first."""
    cases = []
    for question in short:
        length = len(reference.answer(question.input_ids, 48).ids)
        beyond = reference.answer(question.input_ids, length + 8, ignore_eos=True).ids[length:]
        text = tokenizer.decode(beyond, skip_special_tokens=True)
        cases += [(question, 48, {"stop": [text[:size]]}) for size in (1, 3) if text[:size].strip(" ")]
    assert cases
    got = compare(server, reference, cases)
    reasons = [answer["meta_info"]["finish_reason"]["matched"] for answer in got]
    assert tokenizer.eos_token_id in reasons


def test_stop_token_ids(server, reference, questions):
    cases = []
    for question, answer in zip(questions[:3], reference.answers(questions[:3], 48), strict=True):
        cases += [(question, 48, {"stop_token_ids": [answer.ids[at]]}) for at in (0, 5, 11, 20)]
    got = compare(server, reference, cases)
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in got)


def stream(server, body):
    """The server-sent events of one streamed request."""
    data = json.dumps({**body, "stream": True}).encode()
    sent = urllib.request.Request(server.url + "/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=600) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text[len("data: ") :])


def test_streaming(server, reference, questions, short):
    """Chunks only grow, and the last is the whole answer."""
    for question, tokens in ((questions[0], 40), (short[0], 40)):
        body = request(question.input_ids, tokens)
        expected = reference.post([body])[0]
        chunks = list(stream(server, body))
        texts = [chunk["text"] for chunk in chunks]
        assert len(chunks) > 1
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == expected["text"]
        assert chunks[-1]["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        assert chunks[-1]["meta_info"]["completion_tokens"] == len(expected["output_ids"])


def test_log_probabilities(server, reference, questions):
    """Of the chosen tokens, the best three, and one named token, each as plain decoding reports them."""
    bodies = [
        {
            **request(question.input_ids, tokens),
            "return_logprob": True,
            "top_logprobs_num": 3,
            "token_ids_logprob": [198],
        }
        for question, tokens in zip(questions[:3], (17, 22, 24), strict=True)
    ]
    expected = [answer["meta_info"] for answer in reference.post(bodies)]
    for want, have in zip(expected, [answer["meta_info"] for answer in at_once(server, bodies)], strict=True):
        chosen, got = want["output_token_logprobs"], have["output_token_logprobs"]
        assert [entry[1] for entry in got] == [entry[1] for entry in chosen]
        assert [entry[0] for entry in got] == pytest.approx([entry[0] for entry in chosen], abs=1e-4)
        for name in ("output_top_logprobs", "output_token_ids_logprobs"):
            assert len(have[name]) == len(want[name]) == len(chosen)
            for a, b in zip(want[name], have[name], strict=True):
                assert [entry[1] for entry in b] == [entry[1] for entry in a]
                assert [entry[0] for entry in b] == pytest.approx([entry[0] for entry in a], abs=1e-4)


def test_sampled_requests_leave_greedy_ones_alone(server, reference, questions):
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    greedy = [request(question.input_ids, 24) for question in questions[:4]]
    mixed = [request(question.input_ids, 24, **sampled) for question in questions[4:8]]
    got = at_once(server, [body for pair in zip(greedy, mixed, strict=True) for body in pair])
    expected = reference.answers(questions[:4], 24)
    assert_equal(questions[:4], expected, [as_output(answer) for answer in got[::2]])
    for answer in got[1::2]:
        assert 0 < len(answer["output_ids"]) <= 24
        assert sum(character.isascii() for character in answer["text"]) >= 0.9 * len(answer["text"])


def disconnect_early(server, body, after):
    """Start a streamed request and close the connection after some seconds."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    data = json.dumps({**body, "stream": True})
    connection.request("POST", "/generate", data, {"Content-Type": "application/json"})
    time.sleep(after)
    connection.close()


def is_idle(server):
    """No request runs or waits."""
    load = server.get("/v1/loads")["loads"][0]
    return load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0


def test_aborts(server, reference, questions):
    """A client that goes away, and an abort by id, in mid-answer; a neighbour is served as if alone."""
    neighbour = request(questions[2].input_ids, 40)
    expected = reference.answer(questions[2].input_ids, 40)
    answers = {}

    def ask(name, body):
        answers[name] = server.post("/generate", body)

    threads = [
        threading.Thread(target=ask, args=("neighbour", neighbour)),
        threading.Thread(target=ask, args=("named", {**request(questions[5].input_ids, 2000), "rid": "named"})),
        threading.Thread(target=disconnect_early, args=(server, request(questions[6].input_ids, 2000), 2.0)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(2)
    aborted = urllib.request.Request(
        server.url + "/abort_request", json.dumps({"rid": "named"}).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(aborted, timeout=60).close()
    for thread in threads:
        thread.join(300)
    assert answers["named"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert_equal([questions[2]], [expected], [as_output(answers["neighbour"])])
    assert wait_until(lambda: is_idle(server))


def test_two_hundred_mixed_requests_leave_nothing_behind(server, reference, questions, short):
    """Greedy, sampled, stopped, streamed and aborted ones, eight at a time; then the pool is whole."""
    rng = random.Random(0)
    asked = [*questions, *short]
    lock = threading.Lock()
    todo = list(range(200))
    failures, greedy = [], []

    def one(number):
        question = asked[rng.randrange(len(asked))]
        tokens = rng.randrange(8, 25)
        kind = number % 5
        body = request(question.input_ids, tokens)
        if kind == 1:
            body["sampling_params"] |= {"temperature": 0.9, "top_p": 0.8}
        if kind == 2:
            body["sampling_params"] |= {"stop": ["\n", "the"]}
        if kind == 3:
            return disconnect_early(server, body, rng.random())
        if kind == 4:
            return list(stream(server, body))
        answer = server.post("/generate", body)
        if kind == 0:
            with lock:
                greedy.append((question, tokens, answer["output_ids"]))
        return answer

    def worker():
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop()
            try:
                one(number)
            except Exception as error:
                failures.append(f"request {number}: {error!r}")

    workers = [threading.Thread(target=worker) for _ in range(8)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert not failures
    # Greedy answers are prefixes of each other, so one long reference answer per prompt checks them all.
    assert len(greedy) == 40
    long = dict(zip((q.id for q in asked), reference.answers(asked, 24), strict=True))
    for question, tokens, ids in greedy:
        assert ids == long[question.id].ids[:tokens], question.id

    assert wait_until(lambda: is_idle(server))
    time.sleep(2)  # SGLang's own check runs when its loop finds nothing to do, and ends the server on a leak
    assert server.alive()
    flush_cache(server)
    usage = server.get("/v1/loads")["loads"][0]
    assert usage["num_used_tokens"] == 0
    assert not log_has(server, "leak detected")
    answer = as_output(server.post("/generate", request(questions[0].input_ids, 12)))
    assert answer.ids == long[questions[0].id].ids[:12]
