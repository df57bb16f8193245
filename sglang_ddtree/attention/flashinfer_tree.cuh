// The attention variant that owns a draft tree's mask, for FlashInfer's FA2 prefill kernels (0.7.2, FA2 only).
//
// A request's keys are its prefix and then the Q nodes of its tree, which are also its queries. Every node sees the
// prefix; in the tree it sees what its bit row says. The kernel must run in MaskMode::kCustom (variant_owns_mask), so
// that LogitsMask is asked for every key.
//
// Params:
//   tree_bits        int32 [rows, ceil(Q / 32)], rows as in q_indptr; bit j % 32 of word j / 32 is node j. Parents come
//                    before their children.
//   tree_window      with use_window only: a node sees keys up to so many positions back; negative for all of them.
//                    Positions go by depth: siblings share one.
//   logits_soft_cap  with use_logits_soft_cap only; 0 for a layer without one
//   sm_scale
template <bool use_logits_soft_cap, bool use_window>
struct DDTreeAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  const uint32_t* rows;
  uint32_t qo_len, kv_len, window_left;
  uint32_t prefix_len, words;
  int32_t window;
  float sm_scale_log2, soft_cap_pre_tanh_scale;

  template <typename Params>
  __device__ __host__ DDTreeAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    prefix_len = kv_len - qo_len;
    words = (qo_len + 31) / 32;
    rows = reinterpret_cast<const uint32_t*>(params.tree_bits) + uint64_t(params.q_indptr[batch_idx]) * words;
    // The kernel skips tiles by this and by the node's number, which is no position. Planned with a window of
    // tree_window + Q (planned_window in flashinfer_tree.py) it skips only what no node sees; without one, nothing.
    window_left = (params.window_left >= 0) ? params.window_left : kv_len;
    if constexpr (use_window) {
      window = (params.tree_window >= 0) ? int32_t(params.tree_window) : int32_t(kv_len);
    }
    soft_cap_pre_tanh_scale = 0.f;
    sm_scale_log2 = params.sm_scale * math::log2e;
    if constexpr (use_logits_soft_cap) {
      if (params.logits_soft_cap > 0) {
        soft_cap_pre_tanh_scale = params.sm_scale * math::ptx_rcp(float(params.logits_soft_cap));
        sm_scale_log2 = math::log2e * params.logits_soft_cap;
      }
    }
  }

  // A node's row holds its ancestors and itself. (Padding counts one too many; nobody reads what it attends to.)
  __device__ __forceinline__ int32_t depth(uint32_t node) const {
    int32_t seen = 0;
    for (uint32_t word = 0; word < words; ++word) {
      seen += __popc(rows[node * words + word]);
    }
    return seen - 1;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_logits_soft_cap) {
      if (soft_cap_pre_tanh_scale != 0.f) {
        logits = float(math::tanh(logits * soft_cap_pre_tanh_scale));
      }
    }
    return logits;
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    // Lanes beyond the last query ask too, and their answer is dropped.
    const uint32_t node = qo_idx < qo_len ? qo_idx : qo_len - 1;
    if (kv_idx < prefix_len) {
      if constexpr (use_window) {
        // A node is less than qo_len deep: its depth matters only here.
        if (prefix_len + qo_len > kv_idx + uint32_t(window)) {
          return int32_t(prefix_len - kv_idx) + depth(node) <= window;
        }
      }
      return true;
    }
    const uint32_t column = kv_idx - prefix_len;
    if (column >= qo_len) {
      return false;
    }
    bool seen = (rows[node * words + column / 32] >> (column % 32)) & 1;
    if constexpr (use_window) {
      if (window < int32_t(qo_len)) {
        seen = seen && depth(node) - depth(column) <= window;
      }
    }
    return seen;
  })
};
