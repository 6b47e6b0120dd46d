// x [rows, K] times a weight [N, K], with what comes before (norm, rounding) and after it, by the
// SKU's dot product on vectors.
#pragma once
#include "gemm_packed.h"

namespace pelton {

template <class C>
PELTON_INLINE void gemm(void* const* args, pelton_worker* worker, int64_t rows) {
  using Blocks = typename Choose<PackedBlocks<C>, VectorBlocks<C>, C::kPacked>::Type;
  constexpr int kTile = C::kTileRows, kStream = Blocks::kStreamRows;
  Blocks blocks(args, rows);
  const auto* ready = blocks.staged(worker);
  if (rows <= 1) {
    if (rows == 1) run_streams<1>(blocks, ready, worker);
  } else if (rows == 2) {
    run_streams<2>(blocks, ready, worker);
  } else if (rows <= 4) {
    run_streams<4>(blocks, ready, worker);
  } else if (rows <= kTile) {
    run_streams<kTile>(blocks, ready, worker);
  } else if (rows > kStream - kTile && rows <= kStream) {
    run_streams<kStream>(blocks, ready, worker);
  } else {
    run_tiles(blocks, ready, worker);
  }
  if constexpr (Blocks::kPast) store_fence();
}

}  // namespace pelton
