// Layout "kv16" of one KV block of one layer (block = tokens_per_block tokens, a multiple of 16).
//
//   block base = state base + block_id * block_elems(...) * sizeof(T)
//   K of head h: base + h * head_elems;             V of head h: base + (kv_heads + h) * head_elems
//   head_elems = tokens_per_block * head_dim
//   K, PAIR = 2 (bf16): [tokens/16][head_dim/2][16][2]   PAIR = 1 (f32, f16):
//   [tokens/16][head_dim][16] V, PAIR = 2 (bf16): [tokens/2][head_dim][2]          PAIR = 1:
//   [tokens][head_dim]
//
// K panels are GEMM panels (16 keys are the 16 outputs); V pairs feed a dot product over two
// tokens. head_dim is even.
#pragma once
#include <stdint.h>

namespace pelton {

template <int PAIR>
struct KV16 {
  static constexpr int64_t block_elems(int kv_heads, int tokens, int head_dim) {
    return int64_t{2} * kv_heads * tokens * head_dim;
  }
  static constexpr int64_t k_index(int tokens, int head_dim, int head, int token, int d) {
    const int64_t base = static_cast<int64_t>(head) * tokens * head_dim;
    return base + (static_cast<int64_t>(token / 16) * (head_dim / PAIR) + d / PAIR) * (16 * PAIR) +
           (token % 16) * PAIR + d % PAIR;
  }
  static constexpr int64_t v_index(int kv_heads, int tokens, int head_dim, int head, int token,
                                   int d) {
    const int64_t base = static_cast<int64_t>(kv_heads + head) * tokens * head_dim;
    return base + (static_cast<int64_t>(token / PAIR) * head_dim + d) * PAIR + token % PAIR;
  }
};

}  // namespace pelton
