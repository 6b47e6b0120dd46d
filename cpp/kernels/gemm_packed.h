// x [rows, K] times a packed12 weight [N, K], on the bf16 dot product: gemm.h's arithmetic, bit for
// bit, with a quarter fewer bytes from memory.
//
// A stream takes a panel of 32 outputs and unpacks it in registers: two sums of a row are under way
// at once, so that neither waits for the other. Tiles read a block of k of their panels unpacked,
// from a buffer that stays in the second-level cache while the rows pass by.
#pragma once
#include "gemm.h"
#include "packed12.h"

namespace pelton {

template <class C>
struct PackedBlocks : VectorBlocks<C> {
  using Base = VectorBlocks<C>;
  using Base::finish, Base::finish_tile, Base::row_block, Base::rows, Base::weight, Base::M,
      Base::P;
  using Base::kAdvance, Base::kBlockSteps, Base::kPanels, Base::kSteps, Base::kUnit, Base::kUnits;
  using Base::VectorBlocks;
  using typename Base::Compute, typename Base::Dot, typename Base::X;
  using Layout = Packed12<C::kK>;
  using Half = PackedHalf<C::kK>;
  static_assert(__is_same(Dot, DotBf16));

  static constexpr int kStreamPanels = 2;
  static constexpr int64_t kStreams = divide_up(kPanels, kStreamPanels);
  static constexpr int64_t kStepsOfBlock = kPackedDepth / Dot::kStep;
  static_assert(P % kStreamPanels == 0 && kBlockSteps % kStepsOfBlock == 0);
  // How many bytes a stream is read ahead, and up to how many rows both halves go together.
  static constexpr int kNear = 1536, kFar = 12288, kBothHalves = 8;

  alignas(64) Compute unpacked[P][kBlockSteps * kAdvance];

  PELTON_INLINE const uint8_t* panel(int64_t number) const {
    return reinterpret_cast<const uint8_t*>(weight) + number * Layout::kBytes;
  }

  // acc[m][h] += block `number` of row m and half h; the block is kept, unpacked, in `kept`.
  template <int M, int H, class... Kept>
  static PELTON_INLINE void add_block(const X* const (&rows_of)[M], int64_t number,
                                      Half (&halves)[H], F32 (&acc)[M][H], Kept*... kept) {
    __m512i pairs[H][kStepsOfBlock];
    each<H>([&]<int HALF>() { halves[HALF].read(number, pairs[HALF]); });
    if constexpr (sizeof...(Kept) == H) {
      Compute* const to[H] = {kept...};
      for (int s = 0; s < kStepsOfBlock; ++s) {
        for (int h = 0; h < H; ++h) _mm512_store_si512(to[h] + s * kAdvance, pairs[h][s]);
      }
    }
    for (int s = 0; s < kStepsOfBlock; ++s) {
      __m512bh step[H];
      for (int h = 0; h < H; ++h) step[h] = (__m512bh)pairs[h][s];
      Dot::times(rows_of, number * kStepsOfBlock + s, step, acc);
    }
  }

  // M rows (those past the end repeat the last one and are not stored) times one panel.
  template <int M>
  __attribute__((noinline)) void stream(const X* ready, int64_t first_row, int64_t number) const {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    const uint8_t* from = panel(number);
    F32 sums[2][M];
    if constexpr (M <= kBothHalves) {
      Half halves[2] = {Half(from, 0), Half(from, 1)};
      F32 acc[M][2];
      clear(acc);
      for (int64_t b = 0; b < Layout::kBlocks; ++b) {
        read_ahead<kPackedBlock>(halves[0].block(b) + (M <= 4 ? kNear : kFar));
        add_block(rows_of, b, halves, acc);
      }
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < 2; ++h) sums[h][m] = acc[m][h];
      }
    } else {
      // One half after the other, and the next panel is read ahead meanwhile, half of it each time.
      const uint8_t* next = from + Layout::kBytes;
      for (int h = 0; h < 2; ++h, next += Layout::kBytes - Layout::kBlocks * kPackedHalf) {
        Half half[1] = {Half(from, h)};
        F32 acc[M][1];
        clear(acc);
        for (int64_t b = 0; b < Layout::kBlocks; ++b) {
          read_ahead<kPackedHalf>(next + b * kPackedHalf);
          add_block(rows_of, b, half, acc);
        }
        for (int m = 0; m < M; ++m) sums[h][m] = acc[m][0];
      }
    }
    for (int m = 0; m < M && first_row + m < rows; ++m) {
      if constexpr (C::kGated) {
        finish(sums[0][m], sums[1][m], number, first_row + m);
      } else {
        for (int h = 0; h < 2 && 2 * number + h < kUnits; ++h) {
          finish(sums[h][m], sums[h][m], 2 * number + h, first_row + m);
        }
      }
    }
  }
  template <int64_t BYTES>
  static PELTON_INLINE void read_ahead(const uint8_t* from) {
    for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(from + line, 0, 2);
  }

  // The first tile of a block of k: unpacks the panels for itself and for those that follow.
  template <bool FIRST, bool LAST>
  __attribute__((noinline)) void first_tile(const X* ready, int64_t first_row, int64_t group,
                                            int64_t from, F32 (&sums)[M][P],
                                            const char* const (&ahead)[Base::kAhead]) {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    const int64_t first = from / kStepsOfBlock;
    const int64_t end = smaller<int64_t>(from + kBlockSteps, kSteps) / kStepsOfBlock;
    F32 whole[M][P];
    for (int p = 0; p < P; p += 2) {
      const uint8_t* stored = panel((group * P + p) / 2);
      Half halves[2] = {Half(stored, 0, first), Half(stored, 1, first)};
      F32 acc[M][2];
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < 2; ++h) acc[m][h] = FIRST ? zero() : sums[m][p + h];
      }
      for (int64_t b = first; b < end; ++b) {
        const int64_t at = (b - first) * kStepsOfBlock * kAdvance;
        for (int a = p / 2; a < Base::kAhead; a += P / 2) {
          read_ahead<kStepsOfBlock * 64>(reinterpret_cast<const uint8_t*>(ahead[a]) + 2 * at);
        }
        add_block(rows_of, b, halves, acc, unpacked[p] + at, unpacked[p + 1] + at);
      }
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < 2; ++h) whole[m][p + h] = acc[m][h];
      }
    }
    if constexpr (LAST) {
      finish_tile(whole, first_row, group);
    } else {
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] = whole[m][p];
      }
    }
  }
  PELTON_INLINE const Compute* tile_panel(int64_t, int64_t, int p) const { return unpacked[p]; }
  // A half's share of the bytes is less than kAdvance elements a step: two halves cover both.
  PELTON_INLINE const char* stored_at(int64_t group, int64_t from, int64_t p) const {
    const uint8_t* at = panel((group * P + p) / 2);
    if (from > 0) at += Layout::kFirstBlock + from / kStepsOfBlock * kPackedBlock;
    return reinterpret_cast<const char*>(at) + p % 2 * (kBlockSteps * kAdvance * 2);
  }
  template <bool FIRST, bool LAST>
  PELTON_INLINE void tile(const X* ready, int64_t first_row, int64_t group, int64_t from,
                          F32 (&sums)[M][P], const char* const (&ahead)[Base::kAhead], bool first) {
    if (first) return first_tile<FIRST, LAST>(ready, first_row, group, from, sums, ahead);
    Base::template tile_on<FIRST, LAST>(*this, ready, first_row, group, from, sums, ahead);
  }
};

template <class C>
PELTON_INLINE void gemm_packed(void* const* args, pelton_worker* worker, int64_t rows) {
  PackedBlocks<C> blocks(args, rows);
  gemm_rows(blocks, worker, rows);
}

}  // namespace pelton
