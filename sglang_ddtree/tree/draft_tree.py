"""``DraftTree``: a batch of draft trees as plain arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class DraftTree:
    """One tree per request, all padded to the same verify width ``Q = budget + 1``.

    Node 0 is the root: the last committed token, depth 0, log-weight 0. Nodes ``1 .. num_nodes - 1`` are drafts in
    the order they were taken (best first), so a parent precedes its children. Slots from ``num_nodes`` on are padding:
    no parent, no links, depth 0, log-weight -inf, token 0. Token 0 is a real token; padding is told by its parent.

    Attributes:
        tokens: int64 ``[bs, Q]``.
        parents: int64 ``[bs, Q]``, -1 for the root and for padding.
        depths: int64 ``[bs, Q]``.
        log_weights: float32 ``[bs, Q]``, sum of the drafter's log-probabilities from the root.
        next_child: int64 ``[bs, Q]``, first child (the most probable one), -1 if none. SGLang: retrieve_next_token.
        next_sibling: int64 ``[bs, Q]``, next child of the same parent, -1 if none. SGLang: retrieve_next_sibling.
        num_nodes: int64 ``[bs]``, root included.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_weights: torch.Tensor
    next_child: torch.Tensor
    next_sibling: torch.Tensor
    num_nodes: torch.Tensor

    @property
    def batch_size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """Verify width ``Q``: the root and ``budget`` slots."""
        return int(self.tokens.shape[1])

    @property
    def budget(self) -> int:
        return self.width - 1

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def first(self, count: int) -> DraftTree:
        """The trees of the first ``count`` requests, in the same memory."""
        return DraftTree(*(getattr(self, field.name)[:count] for field in fields(self)))

    def copy_(self, other: DraftTree) -> DraftTree:
        """Overwrite these trees with ``other``'s, of the same shape; returns ``self``."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))
        return self


def empty_tree(bs: int, width: int, device: torch.device | str) -> DraftTree:
    """Memory for ``bs`` trees of verify width ``width``; its contents are undefined."""
    links = torch.empty(5, bs, width, dtype=torch.int64, device=device)
    tokens, parents, depths, next_child, next_sibling = links.unbind(0)
    weights = torch.empty(bs, width, dtype=torch.float32, device=device)
    num_nodes = torch.empty(bs, dtype=torch.int64, device=device)
    return DraftTree(tokens, parents, depths, weights, next_child, next_sibling, num_nodes)


def check_invariants(tree: DraftTree) -> None:
    """Check everything that the mask, the walk and SGLang's verify kernels rely on. Host-side, for tests and debugging.

    Raises:
        ValueError: the first broken rule, in one line.
    """
    shape = tree.tokens.shape
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"tokens must be [bs, Q] with Q >= 1, got {tuple(shape)}")
    for name in ("tokens", "parents", "depths", "next_child", "next_sibling", "log_weights"):
        field = getattr(tree, name)
        dtype = torch.float32 if name == "log_weights" else torch.int64
        if field.shape != shape or field.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {tuple(shape)}, got {field.dtype} {tuple(field.shape)}")
        if not field.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if tree.num_nodes.shape != shape[:1] or tree.num_nodes.dtype != torch.int64:
        raise ValueError(
            f"num_nodes must be torch.int64 [bs], got {tree.num_nodes.dtype} {tuple(tree.num_nodes.shape)}"
        )
    for row in range(shape[0]):
        _check_row(tree, row)


def _check_row(tree: DraftTree, row: int) -> None:
    tokens: list[int] = tree.tokens[row].tolist()
    parents: list[int] = tree.parents[row].tolist()
    depths: list[int] = tree.depths[row].tolist()
    weights: list[float] = tree.log_weights[row].tolist()
    next_child: list[int] = tree.next_child[row].tolist()
    next_sibling: list[int] = tree.next_sibling[row].tolist()
    count = int(tree.num_nodes[row])
    where = f"request {row}"

    if not 1 <= count <= len(tokens):
        raise ValueError(f"{where}: num_nodes is {count}, must be 1 to {len(tokens)}")
    if parents[0] != -1 or depths[0] != 0 or weights[0] != 0.0 or next_sibling[0] != -1:
        raise ValueError(f"{where}: node 0 must be a root (parent -1, depth 0, log-weight 0, no sibling)")
    for node in range(1, count):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ValueError(f"{where}: node {node} has parent {parent}, which does not precede it")
        if depths[node] != depths[parent] + 1:
            raise ValueError(f"{where}: node {node} has depth {depths[node]}, its parent has {depths[parent]}")
        if not (math.isfinite(weights[node]) and weights[node] <= weights[parent]):
            raise ValueError(f"{where}: node {node} has log-weight {weights[node]}, its parent has {weights[parent]}")
        if weights[node] > weights[node - 1]:
            raise ValueError(f"{where}: node {node} is more probable than the node before it")
    for node in range(count, len(tokens)):
        slot = (parents[node], next_child[node], next_sibling[node], depths[node], weights[node])
        if slot != (-1, -1, -1, 0, -math.inf):
            raise ValueError(f"{where}: padding slot {node} must have no parent, no links, depth 0, log-weight -inf")

    listed: set[int] = set()
    for parent in range(count):
        siblings: set[int] = set()
        previous, node = -1, next_child[parent]
        while node != -1:
            if not 0 < node < count:
                raise ValueError(f"{where}: the children of node {parent} list {node}, which is not a node")
            if parents[node] != parent:
                raise ValueError(f"{where}: the children of node {parent} list {node}, whose parent is {parents[node]}")
            if node <= previous:
                raise ValueError(f"{where}: the children of node {parent} are not in node order at {node}")
            if tokens[node] in siblings:
                raise ValueError(f"{where}: two children of node {parent} carry token {tokens[node]}")
            siblings.add(tokens[node])
            listed.add(node)
            previous, node = node, next_sibling[node]
    if len(listed) != count - 1:
        missing = min(set(range(1, count)) - listed)
        raise ValueError(f"{where}: node {missing} is in no child list")
