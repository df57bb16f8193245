"""SGLang's own server tests, those that its wheel carries (``sglang.test.kits``), against a DDTREE server.

They are the kits of SGLang's DFLASH and EAGLE tests. Left out are those that download a data set (GSM8K accuracy and
speed, KL divergence) or start another server (parity), those for what DDTREE refuses (hidden states, sampling masks;
``test_decoding_modes.py`` has the refusals), and what is None below. A 135M model on two cores asks for smaller sizes.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import regex
import requests
from engines import STRICT, base_flags, ddtree_flags, log_has
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.radix_cache_server_kit import gen_radix_tree
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecLogprobKit,
    SpecPenaltyKit,
)
from sglang.test.test_utils import run_logprob_check


class TestKits(
    AbortAllMixin,
    BasicAPIContractMixin,
    EBNFConstrainedMixin,
    JSONConstrainedMixin,
    JSONModeMixin,
    MatchedStopMixin,
    RegexConstrainedMixin,
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecLogprobKit,
    SpecPenaltyKit,
    unittest.TestCase,
):
    # The kit's model is an 8B one.
    batch_accept_len_thres = 1.3
    # The kit's schema with ends: this model repeats digits and letters as long as it may.
    json_schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z]{1,12}$"},
                "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
            },
            "required": ["name", "population"],
            "additionalProperties": False,
        }
    )
    # Names without end, drawn at random, in 128 tokens; any JSON, without a limit.
    test_ebnf_generate_complex_json = test_constrained_decoding = None
    # Answers of 512 and 1024 tokens; other engine tests have acceptance and the end of sequence.
    test_acc_length = test_eos_token = None
    # The kit's own is for bf16.
    logprob_match_delta = 1e-3
    abort_all_num_requests = 12
    abort_all_max_new_tokens = 4000

    @pytest.fixture(scope="class", autouse=True)
    def ddtree(self, request, serve, model, tokenizer):
        # Without the flag this small model fills what JSON allows between its tokens with spaces.
        flags = [*base_flags(model), *ddtree_flags(8), "--constrained-json-disable-any-whitespace"]
        with serve("kits", flags, STRICT) as server:
            kits = request.cls
            kits.base_url, kits.process, kits.tokenizer = server.url, server.process, tokenizer
            kits.model = "default"
            kits.client = openai.Client(base_url=f"{server.url}/v1", api_key="none")
            yield
            assert server.alive()
            assert not log_has(server, "leak detected")

    def test_radix_attention(self):
        """The kit's prefix tree with 16 nodes instead of 400, which would take half an hour here."""
        nodes = gen_radix_tree(num_nodes=16, chunk_len=48)
        sampling = [{"max_new_tokens": min(node["decode_len"], 48), "temperature": 0} for node in nodes]
        body = {"input_ids": [node["input_ids"] for node in nodes], "sampling_params": sampling}
        answers = requests.post(self.base_url + "/generate", json=body).json()
        assert [a["meta_info"]["completion_tokens"] for a in answers] == [s["max_new_tokens"] for s in sampling]

    def test_logprob_mixed(self):
        """The kit's check with 16 cases instead of 128."""
        cases = itertools.product((200, 500), (4,), (0,), (0, 100), (True, False), (0, 5))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda case: run_logprob_check(self, case), cases))

    def regex_match(self, text, pattern):
        """Some grammars have no end: an answer cut off at its 128 tokens need only have begun as the pattern says."""
        return regex.fullmatch(pattern, text, partial=len(text) >= 100) is not None

    # What the kits expect of their fixture (``sglang.test.server_fixtures.spec_eagle_fixture``), with shorter answers.

    def send_request(self):
        for words in ("Today is a sunny day", "Who are you?", "Where are you from?"):
            body = {"text": words, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
            assert requests.post(self.base_url + "/generate", json=body).status_code == 200

    def send_requests_abort(self):
        for words in ("Tell me a long story.", "Count to a thousand:"):
            body = {"text": words, "sampling_params": {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}}
            threading.Event().wait(random.uniform(0, 1))
            with pytest.raises(requests.exceptions.Timeout):
                requests.post(self.base_url + "/generate", json=body, timeout=1)

    def run_decode(self, sampling_params):
        body = {
            "text": "Human: Write a travel blog post to Hawaii.\n\nAssistant:",
            "sampling_params": {"max_new_tokens": 48, "temperature": 0.7, **sampling_params},
            "return_logprob": True,
            "top_logprobs_num": 5,
            "logprob_start_len": 0,
        }
        answer = requests.post(self.base_url + "/generate", json=body).json()["meta_info"]
        assert len(answer["output_token_logprobs"]) == answer["completion_tokens"]
        assert answer["completion_tokens"] >= sampling_params.get("min_new_tokens", 1)
