"""The gated delta rule over trees on the device, without a state per node; ``delta_rule.py`` beside has the algebra.

The state before the root is read once for each block of values and stays in registers; what a node needs of its
ancestors is found along the parents. Sums are float32, whatever the inputs are. One warp a program, as in SGLang's
kernel: no reduction crosses warps, and as many programs as an SM has registers for hide each other's latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Deltas:
    """What a verify pass keeps of its nodes in one layer, for ``R`` requests of ``Q`` nodes.

    Attributes:
        key: float32 ``[R, Q, H, K]``, of length one.
        update: float32 ``[R, Q, HV, V]``.
        log_decay: float32 ``[R, Q, HV]``.
        parents: int32 ``[R, Q]``, of all layers; -1 for the root.

    With a first dimension for the layers (not in ``parents``) it is what :func:`fold_triton` takes.
    """

    key: torch.Tensor
    update: torch.Tensor
    log_decay: torch.Tensor
    parents: torch.Tensor


def verify_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    parents: torch.Tensor | None,
    deltas: Deltas,
) -> torch.Tensor:
    """One kernel launch: the outputs of ``N`` trees, and their deltas.

    Args:
        q, k: ``[N, Q, H, K]``, not normalised; only the last two dimensions need be contiguous, as in ``v``.
        v: ``[N, Q, HV, V]``.
        a, b: ``[N, Q, HV]``, contiguous in the last dimension.
        a_log, dt_bias: ``[HV]``.
        states: ``[slots, HV, V, K]``, a slot contiguous; read only.
        slots: integers ``[N]``, each tree's state; below 0 it starts from zero.
        rows: integers ``[N]``, where in ``deltas`` each tree goes.
        parents: integers ``[N, Q]``, a node's parent before it; anything outside of that is brought there, so that
            what a padded request has is harmless. None: a chain.
        deltas: written; wide enough for ``Q`` nodes.

    Returns:
        ``[N, Q, HV, V]``, in the type of ``q``.
    """
    count, width, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    out = torch.empty(count, width, value_heads, value_dim, dtype=q.dtype, device=q.device)
    if count == 0:
        return out
    constants = verify_constants(key_heads, value_heads, key_dim, value_dim, has_parents=parents is not None)
    links = deltas.parents if parents is None else parents
    verify_kernel[(triton.cdiv(value_dim, constants["BV"]), count, value_heads)](
        q, k, v, a, b, a_log, dt_bias, states, slots, rows, links,
        deltas.key, deltas.update, deltas.log_decay, deltas.parents, out,
        width, deltas.key.shape[1], key_dim**-0.5, states.stride(0), *links.stride(),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *a.stride()[:2], *b.stride()[:2],
        **constants,
    )  # fmt: skip
    return out


def fold_triton(
    states: torch.Tensor,
    slots: torch.Tensor,
    last: torch.Tensor,
    track_slots: torch.Tensor | None,
    track_last: torch.Tensor | None,
    deltas: Deltas,
) -> None:
    """One kernel launch: the states of all layers after the last accepted node, from the states before the root.

    Args:
        states: ``[layers, slots, HV, V, K]``, a slot contiguous; changed in place.
        slots: integers ``[N]``; tree ``n`` is in row ``n`` of ``deltas``. Below 0: nothing is done.
        last: integers ``[N]``, the node; below 0: nothing is done.
        track_slots, track_last: a second slot and the node whose state goes there, from the same state before the root;
            both or neither. Below 0: nothing.
        deltas: of all layers.
    """
    layers, num_slots, value_heads, value_dim, key_dim = states.shape
    if len(last) == 0:
        return
    has_track = track_slots is not None and track_last is not None
    constants = fold_constants(deltas.key.shape[3], value_heads, key_dim, value_dim, has_track=has_track)
    fold_kernel[(layers * value_heads, triton.cdiv(value_dim, constants["BV"]), len(last))](
        states, slots, last, track_slots if has_track else slots, track_last if has_track else last,
        deltas.key, deltas.update, deltas.log_decay, deltas.parents,
        deltas.key.shape[2], num_slots, *states.stride()[:2],
        deltas.key.stride(0), deltas.update.stride(0), deltas.log_decay.stride(0),
        **constants,
    )  # fmt: skip


def verify_constants(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, has_parents: bool
) -> dict[str, int]:
    """What the kernel is compiled for."""
    sizes = {"H": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim}
    block = {"BK": triton.next_power_of_2(key_dim), "BV": min(32, triton.next_power_of_2(value_dim))}
    return {**sizes, **block, "HAS_PARENTS": has_parents, "num_warps": 1}


def fold_constants(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, has_track: bool
) -> dict[str, int]:
    """What the kernel is compiled for."""
    sizes = {"H": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim}
    block = {"BK": triton.next_power_of_2(key_dim), "BV": min(32, triton.next_power_of_2(value_dim))}
    return {**sizes, **block, "HAS_TRACK": has_track, "num_warps": 1}


@triton.jit
def _log_decay(a, rate, bias):
    """``-exp(a_log) * softplus(a + dt_bias)``, as SGLang's kernels write it."""
    x = tl.load(a).to(tl.float32) + bias
    return rate * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)


@triton.jit
def _unit(x):
    return x / tl.sqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _parent(links, node, stride, HAS_PARENTS: tl.constexpr):
    """A node before ``node``; -1 for node 0."""
    if HAS_PARENTS:
        found = tl.minimum(tl.maximum(tl.load(links + node * stride).to(tl.int32), 0), node - 1)
    else:
        found = node - 1
    return found


@triton.jit(do_not_specialize=["width", "row_width"])
def verify_kernel(
    q, k, v, a, b, a_log, dt_bias, states, slots, rows, links,
    out_key, out_update, out_decay, out_parents, out,
    width, row_width, scale, state_stride, link_tree, link_node,
    q_tree, q_node, k_tree, k_node, v_tree, v_node, a_tree, a_node, b_tree, b_node,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, HAS_PARENTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tree = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    key_head = head // (HV // H)
    is_first = block == 0
    of_k = tl.arange(0, BK)
    of_v = block * BV + tl.arange(0, BV)
    in_k, in_v = of_k < K, of_v < V

    q += tree * q_tree + key_head * K + of_k
    k += tree * k_tree + key_head * K + of_k
    v += tree * v_tree + head * V + of_v
    a += tree * a_tree + head
    b += tree * b_tree + head
    links += tree * link_tree
    out += (tree * width * HV + head) * V + of_v
    first = tl.load(rows + tree).to(tl.int64) * row_width
    out_key += (first * H + key_head) * K + of_k
    out_update += (first * HV + head) * V + of_v
    out_decay += first * HV + head
    out_parents += first
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)

    slot = tl.load(slots + tree).to(tl.int64)
    place = slot * state_stride + head * (V * K) + of_v[None, :] * K + of_k[:, None]
    there = in_k[:, None] & in_v[None, :] & (slot >= 0)
    state = tl.load(states + place, mask=there, other=0.0).to(tl.float32)

    for node in range(width):
        key = _unit(tl.load(k + node * k_node, mask=in_k, other=0.0).to(tl.float32))
        query = _unit(tl.load(q + node * q_node, mask=in_k, other=0.0).to(tl.float32)) * scale
        value = tl.load(v + node * v_node, mask=in_v, other=0.0).to(tl.float32)
        step = 1.0 / (1.0 + tl.exp(-tl.load(b + node * b_node).to(tl.float32)))
        own = _log_decay(a + node * a_node, rate, bias)
        parent = _parent(links, node, link_node, HAS_PARENTS)

        # Up the path: decay is the sum below the ancestor at hand, so far down to this node.
        decay = own
        of_keys = tl.zeros([BV], tl.float32)
        of_queries = tl.zeros([BV], tl.float32)
        seen = parent
        while seen >= 0:
            other = _unit(tl.load(k + seen * k_node, mask=in_k, other=0.0).to(tl.float32))
            update = tl.load(out_update + seen * (HV * V), mask=in_v, other=0.0) * tl.exp(decay)
            of_keys += tl.sum(other * key) * update
            of_queries += tl.sum(other * query) * update
            decay += _log_decay(a + seen * a_node, rate, bias)
            seen = _parent(links, seen, link_node, HAS_PARENTS)

        from_root = tl.exp(decay)
        of_keys += from_root * tl.sum(state * key[:, None], 0)
        of_queries += from_root * tl.sum(state * query[:, None], 0)
        update = step * (value - of_keys)
        tl.store(out + node * (HV * V), (of_queries + tl.sum(key * query) * update).to(out.dtype.element_ty), mask=in_v)
        tl.store(out_update + node * (HV * V), update, mask=in_v)
        if is_first:
            tl.store(out_decay + node * HV, own)
            if head % (HV // H) == 0:
                tl.store(out_key + node * (H * K), key, mask=in_k)
            if head == 0:
                tl.store(out_parents + node, parent)
        # The next nodes read what other threads of this program have written.
        tl.debug_barrier()


@triton.jit
def _fold_one(
    states, place, there, key, update, decays, links, node, to,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    in_k, in_v,
):  # fmt: skip
    """Write the state after ``node`` to slot offset ``to``."""
    found = tl.zeros([BK, BV], tl.float32)
    decay = 0.0
    seen = node
    while seen >= 0:
        of_key = tl.load(key + seen * (H * K), mask=in_k, other=0.0)
        of_update = tl.load(update + seen * (HV * V), mask=in_v, other=0.0) * tl.exp(decay)
        found += of_key[:, None] * of_update[None, :]
        decay += tl.load(decays + seen * HV)
        seen = _parent(links, seen, 1, True)
    found += tl.load(states + place, mask=there, other=0.0).to(tl.float32) * tl.exp(decay)
    tl.store(states + to, found.to(states.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["row_width", "num_slots"])
def fold_kernel(
    states, slots, last, track_slots, track_last,
    key, update, decays, links,
    row_width, num_slots, state_layer, state_slot, key_layer, update_layer, decay_layer,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, HAS_TRACK: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // HV).to(tl.int64)
    head = tl.program_id(0) % HV
    tree = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + tree).to(tl.int64)
    node = tl.load(last + tree).to(tl.int32)
    if (slot < 0) | (slot >= num_slots):
        return
    of_k = tl.arange(0, BK)
    of_v = tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = of_k < K, of_v < V
    there = in_k[:, None] & in_v[None, :]
    first = tree * row_width
    key += layer * key_layer + (first * H + head // (HV // H)) * K + of_k
    update += layer * update_layer + (first * HV + head) * V + of_v
    decays += layer * decay_layer + first * HV + head
    links += first
    inside = layer * state_layer + head * (V * K) + of_v[None, :] * K + of_k[:, None]
    place = inside + slot * state_slot
    if HAS_TRACK:
        # Before the state that both start from is overwritten.
        track_slot = tl.load(track_slots + tree).to(tl.int64)
        track_node = tl.load(track_last + tree).to(tl.int32)
        if (track_node >= 0) & (track_slot >= 0) & (track_slot < num_slots):
            to = inside + track_slot * state_slot
            _fold_one(states, place, there, key, update, decays, links, track_node, to, H, HV, K, V, BK, BV, in_k, in_v)
    if node >= 0:
        _fold_one(states, place, there, key, update, decays, links, node, place, H, HV, K, V, BK, BV, in_k, in_v)
