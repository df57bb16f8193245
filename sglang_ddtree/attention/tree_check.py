"""Whether a FlashInfer wrapper attends as a tree asks: random batches, what it must give, and the comparison.

Used when a server starts (``flashinfer_backend.py``), by ``scripts/gpu_check.py`` and by tests. Two kinds of batch:

- ``count``: queries and keys are 0, so that every visible key weighs the same, and values are +1 and -1 whose sum over
  the prefix is at most 1. An output times the number of visible keys is a small whole number, exact at any length, and
  one key too many or too few changes it in half of the elements.
- ``random``: everything normal; shows scales, heads that are mixed up, caps. Compared within the dtype's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree.attention.flashinfer_tree import Variant, planned_window
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.tree.bits import ancestor_bits
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import ancestor_mask_torch

#: 16-bit rounding of outputs around 3 and of the weights; what random batches are for is larger.
TOLERANCE = 0.05
DEPTH = 15


class WrongAttention(RuntimeError):
    """A wrapper's output is not the tree's; one line that says where."""


@dataclass(frozen=True)
class Heads:
    """Attention heads of one rank."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Layer:
    """What a model's layer adds: a window by depth (-1: none), a soft cap (0: none), scales of an FP8 cache."""

    window: int = -1
    soft_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Batch:
    """One verify pass over ``bs`` trees of width ``Q``.

    Attributes:
        tree: the trees, on the device.
        prefix_lens: ``bs`` prefix lengths.
        query: ``[bs * Q, heads, dim]`` in the query's dtype.
        keys, values: ``[pages, page_size, kv heads, dim]`` in the cache's dtype.
        pages: int32, each request's pages one after the other.
        page_indptr: int32 ``[bs + 1]``, in pages. ``row_indptr``: int32 ``[bs + 1]``, in query rows.
        last_page_len: int32 ``[bs]``.
        slots: per request int64 ``[prefix + Q]``, the token slots (page * page_size + place), on the CPU.
        is_count: the kind of batch.
    """

    tree: DraftTree
    prefix_lens: tuple[int, ...]
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    page_indptr: torch.Tensor
    row_indptr: torch.Tensor
    last_page_len: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    is_count: bool

    @property
    def width(self) -> int:
        return self.tree.width

    @property
    def page_size(self) -> int:
        return int(self.keys.shape[1])


def make_batch(
    variant: Variant,
    heads: Heads,
    width: int,
    prefix_lens: Sequence[int],
    device: torch.device,
    *,
    kind: str = "random",
    page_size: int = 1,
    seed: int = 0,
) -> Batch:
    """A batch of ``kind``, the same for the same seed. Pages are shuffled, with unused ones between them."""
    rng = torch.Generator().manual_seed(seed)
    bs = len(prefix_lens)
    candidates = random_candidates(Size(bs, width - 1, DEPTH, 8), seed)
    tree = build_tree_reference(*candidates.on(torch.device("cpu")))
    lens = [prefix + width for prefix in prefix_lens]
    page_counts = [-(-length // page_size) for length in lens]
    pages = torch.randperm(sum(page_counts) + 3, generator=rng)[: sum(page_counts)]
    slots = tuple(
        (page.unsqueeze(1) * page_size + torch.arange(page_size)).flatten()[:length]
        for page, length in zip(pages.split(page_counts), lens)
    )
    shape = (int(sum(page_counts)) + 3) * page_size, heads.kv, heads.dim
    query = torch.randn(bs * width, heads.query, heads.dim, generator=rng)
    keys, values = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    if kind == "count":
        query, keys = torch.zeros_like(query), torch.zeros_like(keys)
        values = torch.ones(shape)  # what no request owns must not be seen either
        for request, prefix in zip(slots, prefix_lens):
            signs = torch.randint(0, 2, (request.numel(), *shape[1:]), generator=rng) * 2 - 1
            signs[1 : prefix - prefix % 2 : 2] = -signs[0 : prefix - prefix % 2 : 2]
            values[request] = signs.float()
    paged = -1, page_size, heads.kv, heads.dim
    return Batch(
        tree=_on(tree, device),
        prefix_lens=tuple(prefix_lens),
        query=query.to(variant.query).to(device),
        keys=keys.to(variant.kv).view(paged).to(device),
        values=values.to(variant.kv).view(paged).to(device),
        pages=pages.to(torch.int32).to(device),
        page_indptr=_indptr(page_counts).to(device),
        row_indptr=_indptr([width] * bs).to(device),
        last_page_len=torch.tensor([(length - 1) % page_size + 1 for length in lens], dtype=torch.int32).to(device),
        slots=slots,
        is_count=kind == "count",
    )


def plan_and_run(wrapper: Any, batch: Batch, variant: Variant, heads: Heads, layer: Layer) -> torch.Tensor:
    """``begin_forward`` and ``forward`` as SGLang calls them; the wrapper's bits must be there already."""
    plan(wrapper, batch, variant, heads, layer)
    return run(wrapper, batch, heads, layer)


def plan(wrapper: Any, batch: Batch, variant: Variant, heads: Heads, layer: Layer) -> None:
    window = {} if layer.window < 0 else {"window_left": planned_window(layer.window, batch.width)}
    wrapper.begin_forward(
        batch.row_indptr,
        batch.page_indptr,
        batch.pages,
        batch.last_page_len,
        heads.query,
        heads.kv,
        heads.dim,
        batch.page_size,
        q_data_type=variant.query,
        kv_data_type=variant.kv,
        **window,
    )


def run(wrapper: Any, batch: Batch, heads: Heads, layer: Layer) -> torch.Tensor:
    out: torch.Tensor = wrapper.forward(
        batch.query,
        (batch.keys, batch.values),
        causal=True,
        sm_scale=heads.dim**-0.5,
        window_left=layer.window,
        logits_soft_cap=layer.soft_cap,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
    return out


def visible(tree: DraftTree, request: int, prefix: int, window: int = -1) -> torch.Tensor:
    """The mask of one request from its parents and depths, bool ``[Q, prefix + Q]``; no bits are read."""
    width = tree.width
    depths = tree.depths[request].cpu()
    ancestors = ancestor_mask_torch(_row(tree, request), width - 1)[0]
    mask = torch.cat((torch.ones(width, prefix, dtype=torch.bool), ancestors), 1)
    if window < 0:
        return mask
    positions = torch.cat((torch.arange(prefix), prefix + depths))
    return mask & (prefix + depths.unsqueeze(1) - positions <= window)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sm_scale: float, soft_cap: float
) -> torch.Tensor:
    """Plain attention, float32 ``[rows, heads, dim]``; keys, values ``[n, kv heads, dim]``, mask bool ``[rows, n]``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query.float(), keys) * sm_scale
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)


def compare(
    out: torch.Tensor, batch: Batch, heads: Heads, layer: Layer, requests: Sequence[int] | None = None
) -> float:
    """The largest difference from plain attention over the trees' real nodes.

    Raises:
        WrongAttention: it is too large, or an output is not finite.
    """
    device = out.device
    found = out.float().view(len(batch.prefix_lens), batch.width, heads.query, heads.dim)
    keys, values = (cache.flatten(0, 1).float() for cache in (batch.keys, batch.values))
    worst = 0.0
    for request in range(len(batch.prefix_lens)) if requests is None else requests:
        prefix, nodes = batch.prefix_lens[request], int(batch.tree.num_nodes[request])
        mask = visible(batch.tree, request, prefix, layer.window)[:nodes].to(device)
        slots = batch.slots[request].to(device)
        rows = batch.query[request * batch.width : request * batch.width + nodes]
        scale = heads.dim**-0.5 * layer.k_scale
        want = attend(rows, keys[slots], values[slots], mask, scale, layer.soft_cap) * layer.v_scale
        got = found[request, :nodes]
        if batch.is_count:
            # As numbers of keys; less than half a key is rounding.
            count = mask.sum(1).view(-1, 1, 1)
            want, got, allowed = want * count, got * count, 0.45
        else:
            allowed = TOLERANCE * max(1.0, layer.v_scale)
        difference = (want - got).abs().amax((1, 2))
        difference = torch.where(got.isfinite().all(2).all(1), difference, torch.inf)
        if float(difference.max()) > allowed:
            node = int(difference.argmax())
            raise WrongAttention(
                f"request {request} (prefix {prefix}), node {node}: off by {float(difference[node]):.3g}"
                f"{' keys' if batch.is_count else ''}, {allowed:.2g} is allowed; {int((difference > allowed).sum())} "
                f"of {nodes} nodes are wrong"
            )
        worst = max(worst, float(difference.max()))
    return worst


def check_wrapper(
    make: Callable[[torch.Tensor], Any],
    variant: Variant,
    heads: Heads,
    width: int,
    device: torch.device | None = None,
) -> None:
    """Both kinds of batch with short and long prefixes, the bits written by the server's own function.

    Args:
        make: a wrapper that reads the given bits, int32 ``[rows, ceil(Q / 32)]``.
        device: the current CUDA device if None.

    Raises:
        WrongAttention: the outputs are not the trees'.
    """
    device = torch.device("cuda") if device is None else device
    prefixes = (0, 1, 37, 700)
    bits = torch.zeros(len(prefixes) * width, -(-width // 32), dtype=torch.int32, device=device)
    wrapper = make(bits)
    for seed, kind in enumerate(("count", "random")):
        batch = make_batch(variant, heads, width, prefixes, device, kind=kind, seed=seed)
        ancestor_bits(batch.tree, DEPTH, out=bits)
        compare(plan_and_run(wrapper, batch, variant, heads, Layer()), batch, heads, Layer())


def _row(tree: DraftTree, request: int) -> DraftTree:
    rows = {name: part[request : request + 1].cpu() for name, part in vars(tree).items()}
    return DraftTree(**rows)


def _on(tree: DraftTree, device: torch.device) -> DraftTree:
    return DraftTree(**{name: part.to(device) for name, part in vars(tree).items()})


def _indptr(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(torch.int32)
