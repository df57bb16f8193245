"""Files from strangers: a header that lies is an error, never a crash, a hang, or memory."""

from __future__ import annotations

import json
import os
import random
import resource
import time

import pytest
from bare_files import PUBLISHED, published_shapes, sparse_drafter
from tiny_models import drafter_shapes, write_drafter, write_target

from sglang_ddtree.drafter.check import findings
from sglang_ddtree.drafter.cli import main
from sglang_ddtree.drafter.files import read_header
from sglang_ddtree.drafter.header import MAX_HEADER, read_file_header
from sglang_ddtree.drafter.inspect import inspect
from sglang_ddtree.errors import DDTreeError

MUTATIONS = 5000


def file_of(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": entry(offsets=(0, 800))}, bytes(8)),  # past the end
        ({"a": entry(offsets=(-8, 0))}, bytes(8)),
        ({"a": entry(offsets=(8, 0))}, bytes(8)),
        ({"a": entry(), "b": entry()}, bytes(8)),  # overlap
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        ({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),  # hole
        ({"a": entry()}, bytes(9)),  # bytes that belong to nothing
        ({"a": entry(shape=(3,))}, bytes(8)),  # shape and offsets disagree
        ({"a": entry(shape=(2**40, 2**40), offsets=(0, 8))}, bytes(8)),  # the product overflows
        ({"a": entry(shape=(-2,))}, bytes(8)),
        ({"a": entry(shape=(2.0,))}, bytes(8)),
        ({"a": entry(dtype="PICKLE")}, bytes(8)),
        ({"a": [1, 2]}, b""),
        ([], b""),
        (b"", b""),
        (b"[" * 100_000, b""),
        (b'{"a":' * 50_000, b""),
        (b'{"a": 1' + b"0" * 100_000 + b"}", b""),
        (b"\xff\xfe{}", b""),
    ],
)
def test_lies(tmp_path, header, data):
    with pytest.raises(DDTreeError, match="safetensors file") as error:
        read_file_header(file_of(tmp_path / "lie.safetensors", header, data))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "a\nb", "a\x1b[2J", "a b", "x" * 300, "..", ""])
def test_names_that_no_model_has(tmp_path, name):
    with pytest.raises(DDTreeError, match="tensor named"):
        read_file_header(file_of(tmp_path / "f.safetensors", {name: entry()}, bytes(8)))


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**31, 2**63, 2**64 - 1])
def test_a_huge_header_is_refused_before_it_is_read(tmp_path, length):
    with pytest.raises(DDTreeError, match=f"header of {length} bytes"):
        read_file_header(file_of(tmp_path / "f.safetensors", b"{}", length=length))


def test_only_regular_files_are_opened(tmp_path):
    """A pipe would block for ever."""
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path):
        with pytest.raises(DDTreeError, match="not a regular file"):
            read_header(path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 5, "x" * 5000]
)
def test_an_index_names_files_of_its_own_directory(tmp_path, name):
    draft = write_drafter(tmp_path / "draft")
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    assert "not a file of its own directory" in findings(draft, write_target(tmp_path / "target"))[0].text


def test_an_index_without_files(tmp_path, capsys):
    draft = write_drafter(tmp_path / "draft")
    (draft / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert main(["inspect", str(draft)]) == 2
    assert "names no file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "check", "convert-mask-embedding", "push"])
def test_paths_that_the_system_refuses(tmp_path, capsys, command):
    path = str(tmp_path / ("x" * 300))
    flags = {"check": ["--target", path], "push": ["nowhere.invalid:x", "--dry-run"]}.get(command, [])
    assert main([command, path, *flags]) == 2
    error = capsys.readouterr().err
    assert "too long" in error and error.count("\n") == 1


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to four small faults, most of them in the header, where they matter."""
    result = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if len(result) < 16:
            break  # an earlier fault cut nearly all of it off
        length = len(result) - 8
        at = rng.randrange(8, 8 + length) if rng.random() < 0.9 else rng.randrange(8)
        kind = rng.randrange(6)
        if kind == 0:
            result[at] = rng.randrange(256)
        elif kind == 1:
            result[at : at + rng.randint(1, 40)] = b""
        elif kind == 2:
            result[at:at] = rng.choice((b"9", b"-", b"[", b"{", b'"', b"\\u0000", b"9" * 400, b"null", b"1e999"))
        elif kind == 3:
            other = rng.randrange(8, 8 + length)
            result[at : at + 20] = result[other : other + 20]
        elif kind == 4:
            result[:8] = rng.choice((0, 1, length - 1, length + 1, 2 * length, 2**40, 2**64 - 1)).to_bytes(8, "little")
        else:
            del result[at + rng.randrange(len(result)) :]
    return bytes(result)


def test_mutated_headers(tmp_path):
    """Each is read or refused in one line, at once, and no more memory is used than one header needs."""
    rng = random.Random(6)
    draft = write_drafter(tmp_path / "draft")
    path = draft / "model.safetensors"
    # The data is a hole in every copy; only the header is mutated.
    content = path.read_bytes()
    head, size = content[: 8 + int.from_bytes(content[:8], "little")], len(content)
    read_header(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, slowest = 0, 0.0
    for _ in range(MUTATIONS):
        mutated = mutate(head, rng)
        with path.open("wb") as file:
            file.write(mutated)
            file.truncate(max(len(mutated), size + len(mutated) - len(head)))
        begin = time.process_time()
        try:
            inspect(path)
        except DDTreeError as error:
            assert "\n" not in str(error)
            refused += 1
        slowest = max(slowest, time.process_time() - begin)
    assert 0 < refused < MUTATIONS, "the mutations should break most files, and leave some readable"
    assert slowest < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


# inspect


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_inspect_reads_the_header_only(tmp_path, name):
    published = PUBLISHED[name]
    path = sparse_drafter(tmp_path / "bare.safetensors", published)
    assert path.stat().st_size > 2e9
    begin = time.process_time()
    report = inspect(path)
    assert time.process_time() - begin < 1
    assert (report["family"], report["tensors"], report["taps"]) == ("DFlash", 58, 5)
    assert report["parameters"] == sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in published_shapes(published).values()
    )
    sizes = {key: value for key, value in published.expected.items() if key in report["sizes"]}
    assert {**report["sizes"], **sizes} == report["sizes"]
    assert report["dtypes"] == ({"BF16": 36, "F32": 22} if published.norms == "F32" else {"BF16": 58})
    assert report["missing"] == report["unknown"] == []


def test_inspect_names_what_is_missing_and_unknown(tmp_path, capsys):
    shapes = {**drafter_shapes(), "layers.1.mystery.weight": (3,)}
    del shapes["layers.1.self_attn.k_norm.weight"]
    assert main(["inspect", str(write_drafter(tmp_path / "draft", shapes)), "--json", "--sha256"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == ["layers.1.self_attn.k_norm.weight"]
    assert report["unknown"] == ["layers.1.mystery.weight"]
    assert len(report["sha256"]["model.safetensors"]) == 64


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("candidate_selector.weight", "DFlash2"),
        ("markov_head.weight", "DSpark"),
        ("embed_proj.0.weight", "Domino"),
        ("lilicorr.slot_embedding", "LiLiCorr"),
    ],
)
def test_inspect_other_families(tmp_path, capsys, name, family):
    draft = write_drafter(tmp_path / "draft", {**drafter_shapes(), name: (3,)})
    assert main(["inspect", str(draft)]) == 0
    assert f": {family}\n" in capsys.readouterr().out


def test_inspect_something_else(tmp_path, capsys):
    draft = write_drafter(tmp_path / "draft", {"model.embed_tokens.weight": (4, 4)})
    assert main(["inspect", str(draft / "model.safetensors")]) == 0
    assert "not a drafter" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none.safetensors")]) == 2
    assert "cannot read" in capsys.readouterr().err
