"""The gated delta rule over a tree of tokens, with a state per node and without one.

A Gated DeltaNet head (Yang et al. 2024, arXiv 2412.06464) keeps a state ``S`` ``[V, K]``. A token with decay ``e^g``
(``g <= 0``), step ``b``, key ``k``, value ``v`` and query ``q`` changes it and reads it::

    S <- e^g S        u = b (v - S k)        S <- S + u k^T        o = S q

In a tree the state that a node changes is its parent's. Storing one for each node costs ``V * K`` numbers a head and
node. Written out along the way from the root, with ``d(j, i)`` the sum of ``g`` over the nodes below ``j`` down to
``i``, and ``d(i)`` that of all nodes down to ``i``::

    S_i = e^d(i) S_0 + sum over j of e^d(j, i) u_j k_j^T                       (j: i and its ancestors)
    u_i = b_i (v_i - e^d(i) S_0 k_i - sum over j of e^d(j, i) (k_j . k_i) u_j)     (j: ancestors of i)
    o_i = e^d(i) S_0 q_i + sum over j of e^d(j, i) (k_j . q_i) u_j

Only ``k``, ``u`` and ``g`` of each node are needed: ``K + V + 1`` numbers, and the state after the accepted path
comes from them. Both forms are the same sums in another order. The exponents are never positive, and ``d(j, i)`` is
summed over its own nodes: the difference ``d(i) - d(j)`` would lose what a strong decay before ``j`` rounds away.

References in torch for the kernels (``kernels/delta_rule.py``): host loops over nodes, for any float dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: As SGLang's kernels: under the square root of the norms of keys and queries.
NORM_EPS = 1e-6
#: Beyond it softplus is the identity.
SOFTPLUS_THRESHOLD = 20.0


@dataclass(frozen=True)
class Tokens:
    """What the rule takes of each node, for ``bs`` trees of ``Q`` nodes and ``HV`` value heads; one float dtype.

    Attributes:
        query, key: ``[bs, Q, HV, K]``, of length one; the query is scaled too.
        value: ``[bs, Q, HV, V]``.
        log_decay: ``g``, ``[bs, Q, HV]``.
        step: ``b``, ``[bs, Q, HV]``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    step: torch.Tensor


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tokens:
    """A layer's projections as the rule takes them, with the conventions of SGLang's Gated DeltaNet kernels.

    Args:
        q, k: ``[bs, Q, H, K]``; every key head serves ``HV / H`` value heads.
        v: ``[bs, Q, HV, V]``.
        a, b: ``[bs, Q, HV]``.
        a_log, dt_bias: ``[HV]``.
    """
    repeat = v.shape[2] // k.shape[2]
    q, k = (x.to(dtype) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for x in (q, k))
    x = a.to(dtype) + dt_bias.to(dtype)
    softplus = torch.where(x <= SOFTPLUS_THRESHOLD, x.exp().log1p(), x)
    return Tokens(
        query=(q * q.shape[-1] ** -0.5).repeat_interleave(repeat, dim=2),
        key=k.repeat_interleave(repeat, dim=2),
        value=v.to(dtype),
        log_decay=-a_log.to(dtype).exp() * softplus,
        step=b.to(dtype).sigmoid(),
    )


def verify_with_states(
    tokens: Tokens, parents: torch.Tensor, initial: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence itself, each node from its parent's state.

    Args:
        parents: integers ``[bs, Q]``; a node's parent precedes it. Node 0 is the root; a node without a parent
            (padding) is taken for a child of the root.
        initial: ``[bs, HV, V, K]``, the state before the root.

    Returns:
        Outputs ``[bs, Q, HV, V]`` and the state after each node, ``[bs, Q, HV, V, K]``.
    """
    rows = torch.arange(len(initial))
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for node, parent in enumerate(_parents(parents).unbind(1)):
        before = torch.stack(states)[parent, rows] if node else initial
        query, key, value, log_decay, step = _node(tokens, node)
        decayed = before * log_decay.exp()[..., None, None]
        update = step[..., None] * (value - torch.einsum("bhvk,bhk->bhv", decayed, key))
        states.append(decayed + update.unsqueeze(-1) * key.unsqueeze(-2))
        outputs.append(torch.einsum("bhvk,bhk->bhv", states[-1], query))
    return torch.stack(outputs, 1), torch.stack(states, 1)


def verify_with_deltas(
    tokens: Tokens, parents: torch.Tensor, initial: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the initial state alone.

    Args: as :func:`verify_with_states`.

    Returns:
        Outputs and updates ``u``, each ``[bs, Q, HV, V]``.
    """
    decay = path_decays(tokens.log_decay, parents)
    from_root = decay[..., -1].exp().unsqueeze(-1)
    # Zero between nodes that are not on one path: their decay is -inf.
    weights = decay[..., :-1].exp()
    of_keys = weights * torch.einsum("bihk,bjhk->bihj", tokens.key, tokens.key)
    of_queries = weights * torch.einsum("bihk,bjhk->bihj", tokens.query, tokens.key)
    rest = tokens.value - from_root * torch.einsum("bhvk,bihk->bihv", initial, tokens.key)
    updates = torch.zeros_like(tokens.value)
    for node in range(parents.shape[1]):
        known = torch.einsum("bhj,bjhv->bhv", of_keys[:, node, :, :node], updates[:, :node])
        updates[:, node] = tokens.step[:, node].unsqueeze(-1) * (rest[:, node] - known)
    outputs = from_root * torch.einsum("bhvk,bihk->bihv", initial, tokens.query)
    return outputs + torch.einsum("bihj,bjhv->bihv", of_queries, updates), updates


def fold(
    initial: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    log_decay: torch.Tensor,
    parents: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """The state after one node of each tree.

    Args:
        initial: ``[bs, HV, V, K]``, the state before the root.
        key, update, log_decay: of every node, as in :class:`Tokens` and from :func:`verify_with_deltas`.
        parents: as in :func:`verify_with_states`.
        last: integers ``[bs]``, the node.

    Returns:
        ``[bs, HV, V, K]``.
    """
    rows = torch.arange(len(initial))
    decay = path_decays(log_decay, parents)[rows, last]
    weighted = update * decay[..., :-1].exp().transpose(1, 2).unsqueeze(-1)
    return initial * decay[..., -1].exp()[..., None, None] + torch.einsum("bjhv,bjhk->bhvk", weighted, key)


def path_decays(log_decay: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """``d(j, i)`` for all pairs of nodes.

    Args:
        log_decay: ``[bs, Q, HV]``.

    Returns:
        ``[bs, Q, HV, Q + 1]``: at ``[:, i, :, j]`` the sum below ``j`` down to ``i``, 0 for ``i`` itself, -inf where
        ``j`` is neither ``i`` nor an ancestor; at ``[:, i, :, Q]`` the sum from the root's down to ``i``.
    """
    bs, width, heads = log_decay.shape
    rows = torch.arange(bs)
    found = log_decay.new_full((bs, width, heads, width + 1), -torch.inf)
    start = log_decay.new_full((bs, heads, width + 1), -torch.inf)
    start[..., width] = 0
    for node, parent in enumerate(_parents(parents).unbind(1)):
        above = found[rows, parent] if node else start
        found[:, node] = above + log_decay[:, node].unsqueeze(-1)
        found[:, node, :, node] = 0
    return found


def _parents(parents: torch.Tensor) -> torch.Tensor:
    """Padding hangs below the root. The first column is not used."""
    return parents.clamp(min=0).to(torch.int64)


def _node(tokens: Tokens, node: int) -> tuple[torch.Tensor, ...]:
    fields = tokens.query, tokens.key, tokens.value, tokens.log_decay, tokens.step
    return tuple(field[:, node] for field in fields)
