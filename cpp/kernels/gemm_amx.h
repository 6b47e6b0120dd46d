// x [rows, K] times a weight [N, K] in bf16, on tiles: 16 pairs of k of 16 outputs are one tile.
//
// An output's sum starts at zero and takes 32 values of k at a time, in order, whatever the shape
// of the tiles and however many of their rows are in use; the instruction itself treats each row
// alike. So few rows are tiles of few rows, and results depend on (N, K) alone.
#pragma once
#include "gemm_amx_stream.h"
#include "gemm_amx_tiles.h"

namespace pelton {

// From so many rows on, they would sweep what else is in the first-level cache. If they go past it,
// GEMMs of 64 rows with K of 896 take up to a tenth less time, with K of 4864 as much; those of 40
// rows take 2 % more.
inline constexpr int64_t kSweepingRows = 48;

template <class C>
PELTON_INLINE void gemm_amx(void* const* args, pelton_worker* worker, int64_t rows) {
  if (rows <= 0) return;
  if (rows <= AmxStream<C, 1>::kMostRows) {
    AmxStream<C, 1> stream(args, rows, worker);
    stream.run();
  } else if (rows < kSweepingRows) {
    AmxStream<C, 2> stream(args, rows, worker);
    stream.run();
  } else if (rows <= AmxStream<C, 2>::kMostRows) {
    AmxStream<C, 2, true> stream(args, rows, worker);
    stream.run();
  } else {
    AmxTiles<C> tiles(args, rows);
    tiles.run(tiles.staged(worker), worker);
  }
  if constexpr (AmxRows<C>::kPast) store_fence();
}

}  // namespace pelton
