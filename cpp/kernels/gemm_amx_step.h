// What a GEMM on tiles is made of: its registers, one step, and what becomes of the sums.
#pragma once
#include "amx.h"
#include "gemm_feed.h"
#include "gemm_rows.h"

namespace pelton {

struct DotTile {
  using X = bf16;
  static constexpr int kStep = kTileBf16Depth;
};

// Each of two tiles of rows times each of two panels has a tile of sums: with the rows' and the
// panels' own that is all eight registers, and each tile that is loaded serves twice.
template <class C>
struct AmxRows : GemmRows<C, DotTile> {
  using Rows = GemmRows<C, DotTile>;
  using Rows::finish, Rows::rows, Rows::weight;
  using Rows::GemmRows;
  using Rows::kPanels, Rows::kSteps, Rows::kStride;
  using typename Rows::Compute, typename Rows::X;
  using Feed = PanelFeed<C, Rows>;
  static_assert(__is_same(Compute, bf16));

  static constexpr int kRows = 2 * kTileHeight;
  static constexpr int kRowTile = 4, kPanelTile = 6;  // of each two
  template <int ROW, int PANEL>
  static constexpr int kSumTile = ROW * 2 + PANEL;
  static constexpr int64_t kTile = kTileBf16Depth * kLanes;  // elements of a panel in a step
  static constexpr int64_t kStepPieces = kTileBf16Depth / Feed::kDepth;
  static constexpr int64_t kPairs = divide_up(kPanels, 2);
  using Sums = F32[kRows][2];

  LiveTiles tiles;

  // Row tiles hold `count` rows, at most kRows, in both.
  PELTON_INLINE void shape(int64_t count) {
    tiles.shape(count, [&](TileConfig& config) {
      for (int r = 0; r < 2; ++r) {
        const int64_t left = larger<int64_t>(count - r * kTileHeight, 0);
        const int64_t height = smaller<int64_t>(left, kTileHeight);
        config.shape(kRowTile + r, height);
        for (int p = 0; p < 2; ++p) config.shape(r * 2 + p, height);
      }
      for (int p = 0; p < 2; ++p) config.shape(kPanelTile + p, kTileHeight);
    });
  }

  // 32 values of k of USED tiles of rows (PAST: which go past the first-level cache) and of both
  // panels.
  template <int USED, bool PAST = false>
  static PELTON_INLINE void step(const X* from, const Compute* first, const Compute* second) {
    load_rows<0, PAST>(from);
    tile_load<kPanelTile>(first, kTileRowBytes);
    tile_dot_bf16<kSumTile<0, 0>, kRowTile, kPanelTile>();
    tile_load<kPanelTile + 1>(second, kTileRowBytes);
    tile_dot_bf16<kSumTile<0, 1>, kRowTile, kPanelTile + 1>();
    if constexpr (USED > 1) {
      load_rows<1, PAST>(from + kTileHeight * kStride);
      tile_dot_bf16<kSumTile<1, 0>, kRowTile + 1, kPanelTile>();
      tile_dot_bf16<kSumTile<1, 1>, kRowTile + 1, kPanelTile + 1>();
    }
  }

  template <int USED>
  static PELTON_INLINE void clear_sums() {
    each_sum<USED>([]<int TILE>(int, int) { tile_zero<TILE>(); });
  }
  template <int USED>
  static PELTON_INLINE void load_sums(const Sums& from) {
    each_sum<USED>(
        [&]<int TILE>(int row, int panel) { tile_load<TILE>(&from[row][panel], sizeof from[0]); });
  }
  template <int USED>
  static PELTON_INLINE void store_sums(Sums& to) {
    each_sum<USED>(
        [&]<int TILE>(int row, int panel) { tile_store<TILE>(&to[row][panel], sizeof to[0]); });
  }

  // The outputs of one row and a pair of panels.
  PELTON_INLINE void finish_pair(const F32 (&sums)[2], int64_t pair, int64_t row) const {
    if constexpr (C::kGated) {
      finish(sums[0], sums[1], pair, row);
    } else {
      for (int p = 0; p < 2; ++p) {
        if (2 * pair + p < kPanels) finish(sums[p], sums[p], 2 * pair + p, row);
      }
    }
  }

 private:
  template <int ROW, bool PAST>
  static PELTON_INLINE void load_rows(const X* from) {
    constexpr int64_t kRowBytes = kStride * sizeof(X);
    if constexpr (PAST) {
      tile_load_past<kRowTile + ROW>(from, kRowBytes);
    } else {
      tile_load<kRowTile + ROW>(from, kRowBytes);
    }
  }
  // f.template operator()<TILE>(first row, panel) for each tile of sums in use.
  template <int USED, class F>
  static PELTON_INLINE void each_sum(const F& f) {
    each<USED>([&]<int ROW>() {
      each<2>([&]<int PANEL>() {
        f.template operator()<kSumTile<ROW, PANEL>>(ROW * kTileHeight, PANEL);
      });
    });
  }
};

}  // namespace pelton
