"""Where a request ends when one verify step brings several tokens: exactly where plain decoding would have ended."""

import itertools
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ddtree.hooks import finish_token_by_token

EOS = ord("$")


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_id = EOS
    additional_stop_token_ids = None

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def encode(self, text, **_):
        return [ord(c) for c in text]


def finish(text, steps, update, **sampling):
    """Feed ``text`` in ``steps`` of tokens until the request ends; what the client gets, and why it ended."""
    params = SamplingParams(max_new_tokens=sampling.pop("max_new_tokens", 99), temperature=0, **sampling)
    params.normalize(Letters())
    req = Req("rid", "", [1, 2, 3], params, vocab_size=256, eos_token_ids={EOS})
    req.tokenizer = Letters()
    taken = iter(text)
    for size in steps:
        run = [ord(c) for c in itertools.islice(taken, size)]
        req.output_ids.extend(run)
        before = list(req.output_ids)
        update(req, len(run))
        assert list(req.output_ids) == before, "tokens whose KV is committed must stay"
        if req.finished():
            return Letters().decode(req.output_ids_through_stop), req.finished_reason.to_json()
    return Letters().decode(req.output_ids), None


def by_hook(req, count):
    finish_token_by_token(Req.update_finish_state, req, count)


CASES = {
    "end of sequence, then a stop string": ("abc$xyz..", {"stop": ["xyz"]}),
    "the later stop string comes first in the list": ("abXcdYef.", {"stop": ["Y", "X"]}),
    "a stop token, then a stop string": ("ab!cdXef.", {"stop": ["X"], "stop_token_ids": [ord("!")]}),
    "a stop string over two steps": ("abcXYdef.", {"stop": ["cXY"]}),
    "a stop string at the length limit": ("abcdXfgh.", {"stop": ["X"], "max_new_tokens": 5}),
    "a stop string just past the length limit": ("abcdXfgh.", {"stop": ["X"], "max_new_tokens": 4}),
    "end of sequence just past the length limit": ("abcd$fgh.", {"max_new_tokens": 4}),
    "a regular expression, then end of sequence": ("ab12c$de.", {"stop_regex": ["[0-9]+"]}),
    "end of sequence ignored": ("ab$cdefgh", {"ignore_eos": True, "max_new_tokens": 6}),
    "nothing ends it": ("abcdefghi", {}),
}


@pytest.mark.parametrize("steps", [(1, 8), (2, 3, 4), (3, 6), (4, 5), (5, 4), (9,)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_where_single_tokens_end(case, steps):
    text, sampling = CASES[case]
    expected = finish(text, [1] * len(text), Req.update_finish_state, **sampling)
    assert finish(text, steps, by_hook, **sampling) == expected


def test_a_grammar_has_cut_the_run_already():
    """Its state is that of the whole run, so the run must be looked at as a whole."""
    seen = []
    req = SimpleNamespace(grammar=object(), output_ids=[1, 2, 3])
    finish_token_by_token(lambda r, n: seen.append(n), req, 3)
    assert seen == [3]
