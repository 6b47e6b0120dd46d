// x [rows, K] times a weight [N, K] in bf16, on tiles: 16 pairs of k of a panel16 weight are one
// tile; a packed12 weight is unpacked into such, a block of k at a time.
//
// An output's sum starts at zero and takes 32 values of k at a time, in order, whatever the shape
// of the tiles and however many of their rows are in use; the instruction itself treats each row
// alike. So few rows are tiles of few rows, and results depend on (N, K) alone.
#pragma once
#include "amx.h"
#include "gemm_walk.h"

namespace pelton {

struct DotTile {
  using X = bf16;
  static constexpr int kStep = kTileBf16Depth;
};

// kTileRows is a multiple of 16. Registers: the sums of a tile, its rows, its panels.
template <class C>
struct AmxBlocks : GemmRows<C, DotTile> {
  using Rows = GemmRows<C, DotTile>;
  using Rows::finish_stream, Rows::finish_tile, Rows::rows, Rows::weight, Rows::M, Rows::P;
  using Rows::GemmRows;
  using Rows::kAdvance, Rows::kAhead, Rows::kBlockSteps, Rows::kLastSteps;
  using Rows::kPanel, Rows::kSteps, Rows::kStreamPanels, Rows::kStride;
  using typename Rows::Compute, typename Rows::X;
  static constexpr int64_t kDepth = kTileBf16Depth;

  static constexpr int R = M / kTileHeight;
  static constexpr int kRowTile = R * P, kPanelTile = kRowTile + R;
  static_assert(__is_same(Compute, bf16) && M % kTileHeight == 0);
  static_assert(kPanelTile + P <= kTileRegisters,
                "too many tiles; panels of a packed12 weight go by two");
  template <int ROW, int PANEL>
  static constexpr int kSumTile = ROW * P + PANEL;

  // Pairs of k in the last step of a panel; if not all of them, the rest must not be read.
  static constexpr int64_t kLastPairs = (kPanel - (kSteps - 1) * kAdvance) / (2 * kLanes);
  static constexpr bool kPartial = 2 * kLastPairs < kTileBf16Depth;
  // How many bytes a stream is read ahead: some steps. With more rows a step takes longer, and the
  // first-level cache is wanted for the rows.
  static constexpr int kNear = 4096, kFar = 8192;

  // Of a packed12 weight the panels in use, or one.
  static constexpr int64_t kUnpacked = C::kPacked ? kBlockSteps * kAdvance : 1;
  alignas(64) Compute unpacked[P][kUnpacked];

  int64_t shaped = 0;  // rows that the registers are shaped for; 0: there is no configuration

  PELTON_INLINE ~AmxBlocks() {
    if (shaped != 0) tile_release();
  }

  // Row tiles hold `count` rows, at most M, in all.
  PELTON_INLINE void shape(int64_t count) {
    if (count == shaped) return;
    TileConfig config;
    for (int r = 0; r < R; ++r) {
      const int64_t left = larger<int64_t>(count - r * kTileHeight, 0);
      const int64_t height = smaller<int64_t>(left, kTileHeight);
      config.shape(kRowTile + r, height);
      for (int p = 0; p < P; ++p) config.shape(r * P + p, height);
    }
    for (int p = 0; p < P; ++p) config.shape(kPanelTile + p, kTileHeight);
    tile_config(&config);
    shaped = count;
  }

  // One step: 32 values of k of USED row tiles and PANELS panels.
  template <int USED, int PANELS>
  static PELTON_INLINE void step(const X* from, const Compute* const (&panels)[PANELS],
                                 int64_t at) {
    each<USED>([&]<int ROW>() {
      tile_load<kRowTile + ROW>(from + ROW * kTileHeight * kStride, kStride * sizeof(X));
    });
    each<PANELS>([&]<int PANEL>() {
      tile_load<kPanelTile + PANEL>(panels[PANEL] + at, kTileRowBytes);
      each<USED>([&]<int ROW>() {
        tile_dot_bf16<kSumTile<ROW, PANEL>, kRowTile + ROW, kPanelTile + PANEL>();
      });
    });
  }

  // `steps` steps; the last one may be the panel's last (LAST). Meanwhile memory at `ahead` is
  // brought into the cache of level 1 (LOCALITY 3) or 2.
  template <int USED, bool LAST, int LOCALITY, int PANELS, int A>
  static PELTON_INLINE void dot(const X* from, const Compute* const (&panels)[PANELS],
                                int64_t steps, const char* const (&ahead)[A]) {
    constexpr int64_t kBytes = kAdvance * sizeof(Compute);
    constexpr bool kRest = LAST && kPartial;
    const int64_t whole = kRest ? steps - 1 : steps;
    for (int64_t s = 0; s < whole; ++s) {
      for (int a = 0; a < A; ++a) {
        for (int64_t line = 0; line < kBytes; line += 64) {
          __builtin_prefetch(ahead[a] + s * kBytes + line, 0, LOCALITY);
        }
      }
      step<USED>(from + s * kTileBf16Depth, panels, s * kAdvance);
    }
    if constexpr (kRest) {
      alignas(64) Compute padded[PANELS][kAdvance];
      const Compute* rest[PANELS];
      for (int p = 0; p < PANELS; ++p) {
        for (int64_t pair = 0; pair < kTileHeight; ++pair) {
          const int64_t at = pair * 2 * kLanes;
          const Compute* stored = panels[p] + whole * kAdvance + at;
          store_int(reinterpret_cast<int32_t*>(padded[p] + at),
                    pair < kLastPairs ? load_int(reinterpret_cast<const int32_t*>(stored))
                                      : splat_int(0));
        }
        rest[p] = padded[p];
      }
      step<USED>(from + whole * kTileBf16Depth, rest, 0);
    }
  }

  // At most MOST rows times kStreamPanels panels, one at a time.
  template <int MOST>
  __attribute__((noinline)) void stream(const X* ready, int64_t first_row, int64_t number) {
    constexpr int USED = MOST / kTileHeight;
    const int64_t count = smaller<int64_t>(rows - first_row, MOST);
    if constexpr (USED > 1) {
      if (count <= MOST - kTileHeight) {
        return stream<MOST - kTileHeight>(ready, first_row, number);
      }
    }
    shape(count);
    F32 sums[MOST][kStreamPanels];
    for (int part = 0; part < kStreamPanels; ++part) {
      const int64_t which = number * kStreamPanels + part;
      each<USED>([&]<int ROW>() { tile_zero<kSumTile<ROW, 0>>(); });
      const X* from = ready + first_row * kStride;
      if constexpr (C::kPacked) {
        int64_t done = 0;
        for (; done + kBlockSteps < kSteps; done += kBlockSteps, from += kBlockSteps * kDepth) {
          unpack_panel(which, done, 0);
          add<USED, false>(from, unpacked[0], kBlockSteps, 0);
        }
        unpack_panel(which, done, 0);
        add<USED, true>(from, unpacked[0], kLastSteps, 0);
      } else {
        add<USED, true>(from, weight + which * kPanel, kSteps, USED == 1 ? kNear : kFar);
      }
      each<USED>([&]<int ROW>() {
        tile_store<kSumTile<ROW, 0>>(&sums[ROW * kTileHeight][part], sizeof sums[0]);
      });
    }
    finish_stream(sums, first_row, number);
  }
  // Steps of one panel; what lies `distance` bytes further is read ahead.
  template <int USED, bool LAST>
  static PELTON_INLINE void add(const X* from, const Compute* panel, int64_t steps, int distance) {
    const Compute* const panels[1] = {panel};
    const char* const ahead[1] = {reinterpret_cast<const char*>(panel) + distance};
    dot<USED, LAST, USED == 1 ? 3 : 2>(from, panels, steps, ahead);
  }
  // A block of k of a packed12 panel, from step `from` on, to place `to` of the buffer.
  PELTON_INLINE void unpack_panel(int64_t which, int64_t from, int to) {
    const int64_t end = smaller<int64_t>((from + kBlockSteps) * kDepth, C::kK);
    unpack<C::kK, kNear>(weight, which, from * kDepth / kPackedDepth, end / kPackedDepth,
                         unpacked[to]);
  }

  // Steps `from`.. of one tile, which fills USED row tiles or fewer.
  template <int USED, bool FIRST, bool LAST>
  __attribute__((noinline)) void tile_of(const X* ready, int64_t first_row, int64_t group,
                                         int64_t from, F32 (&sums)[M][P],
                                         const char* const (&ahead)[kAhead]) {
    const int64_t count = smaller<int64_t>(rows - first_row, M);
    if constexpr (USED > 1) {
      if (count <= (USED - 1) * kTileHeight) {
        return tile_of<USED - 1, FIRST, LAST>(ready, first_row, group, from, sums, ahead);
      }
    }
    shape(count);
    const Compute* panels[P];
    for (int p = 0; p < P; ++p) {
      panels[p] = C::kPacked ? unpacked[p] : weight + (group * P + p) * kPanel + from * kAdvance;
    }
    const auto each_sum = [](const auto& f) {
      each<USED>(
          [&]<int ROW>() { each<P>([&]<int PANEL>() { f.template operator()<ROW, PANEL>(); }); });
    };
    each_sum([&]<int ROW, int PANEL>() {
      if constexpr (FIRST) {
        tile_zero<kSumTile<ROW, PANEL>>();
      } else {
        tile_load<kSumTile<ROW, PANEL>>(&sums[ROW * kTileHeight][PANEL], sizeof sums[0]);
      }
    });
    dot<USED, LAST, 2>(ready + first_row * kStride + from * kTileBf16Depth, panels,
                       LAST ? kLastSteps : kBlockSteps, ahead);
    each_sum([&]<int ROW, int PANEL>() {
      tile_store<kSumTile<ROW, PANEL>>(&sums[ROW * kTileHeight][PANEL], sizeof sums[0]);
    });
    if constexpr (LAST) finish_tile(sums, first_row, group);
  }
  template <bool FIRST, bool LAST>
  PELTON_INLINE void tile(const X* ready, int64_t first_row, int64_t group, int64_t from,
                          F32 (&sums)[M][P], const char* const (&ahead)[kAhead], bool fresh) {
    if constexpr (C::kPacked) {
      for (int p = 0; fresh && p < P; ++p) unpack_panel(group * P + p, from, p);
    }
    tile_of<R, FIRST, LAST>(ready, first_row, group, from, sums, ahead);
  }
};

template <class C>
PELTON_INLINE void gemm_amx(void* const* args, pelton_worker* worker, int64_t rows) {
  AmxBlocks<C> blocks(args, rows);
  const bf16* ready = blocks.staged(worker);
  if (rows <= C::kTileRows) {
    run_streams<C::kTileRows>(blocks, ready, worker);
  } else {
    run_tiles(blocks, ready, worker);
  }
}

}  // namespace pelton
