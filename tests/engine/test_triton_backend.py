"""SGLang's Triton attention backend and the project's kernels serve DDTREE, in Triton's interpreter, without a GPU.

Everything of the GPU path but CUDA graphs: masks in SGLang's full layout, kernels that build the tree and write its
mask, SGLang's Triton attention over the tree, its walk and its move of the accepted path in the KV cache.
"""

from __future__ import annotations

import pytest
import random_models
from engines import STRICT, assert_equal, log_has
from server_plugins import INTERPRETER, joined

from sglang_ddtree.bench.lossless import acceptance_length, generate_all

TOKENS = 20
#: A small pool, one program per head and request in decode attention, nothing to warm up: all of it costs time here.
FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--random-seed", "1", "--max-total-tokens", "2048"),
    *("--max-running-requests", "8", "--skip-server-warmup", "--triton-attention-num-kv-splits", "1"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The drafter has a sliding window that is shorter than the prompts, one layer in two."""
    directory = tmp_path_factory.mktemp("random")
    return random_models.write_target(directory / "target"), random_models.write_drafter(
        directory / "drafter", windows=(24, None)
    )


@pytest.fixture(scope="module")
def flags(models):
    target, _ = models
    return ["--model-path", str(target), *FLAGS]


@pytest.fixture(scope="module")
def asked():
    return random_models.questions(7, (5, 70, 33))


@pytest.fixture(scope="module")
def answers(serve, flags, asked):
    with serve("interpreted AR", flags, INTERPRETER) as server:
        assert log_has(server, "'attention_backend': 'triton'")
        return generate_all(server, asked, TOKENS, len(asked), ignore_eos=True)


@pytest.mark.parametrize(("budget", "page_size"), [(24, 1), (5, 16)])
def test_the_gpu_path_equals_plain_decoding(serve, models, flags, asked, answers, budget, page_size, tmp_path):
    known = [(question.input_ids, answer.ids) for question, answer in zip(asked, answers, strict=True)]
    env = joined(INTERPRETER, STRICT, random_models.write_oracle(tmp_path / "oracle", known))
    ddtree = [
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(models[1])),
        *("--speculative-ddtree-budget", str(budget), "--page-size", str(page_size)),
    ]
    with serve(f"interpreted {budget}", [*flags, *ddtree], env) as server:
        got = generate_all(server, asked, TOKENS, len(asked), ignore_eos=True)
        assert_equal(asked, answers, got)
        assert acceptance_length(got) > 2
        for kernel in ("build_tree_triton", "write_tree_columns"):
            assert log_has(server, f"interpreted: {kernel}")
        assert not log_has(server, "leak detected")
