// Products with a packed12 weight in vectors: gemm_vectors.h's arithmetic, bit for bit, with a
// quarter fewer bytes from memory.
//
// A stream takes a panel of 32 outputs and unpacks it in registers; of few rows both halves at
// once, so that neither sum waits for the other. Of tiles the first to need a block of k unpacks
// its panels, for itself and into a buffer, which stays in the second-level cache for those that
// follow.
#pragma once
#include "gemm_vectors.h"

namespace pelton {

template <class C>
struct PackedBlocks : VectorBlocks<C> {
  using Base = VectorBlocks<C>;
  using Base::finish_stream, Base::row_block, Base::weight, Base::M, Base::P;
  using Base::kAdvance, Base::kAhead, Base::kBlockSteps, Base::kStepUnit, Base::kSteps;
  using Base::VectorBlocks;
  using typename Base::Compute, typename Base::Dot, typename Base::X;
  using Layout = Packed12<C::kK>;
  using Half = PackedHalf<C::kK>;

  // How many bytes a stream is read ahead, and up to how many rows both halves go together: more
  // sums than these leave the registers, where bf16 is widened sooner.
  static constexpr int kNear = 1536, kFar = 12288;
  static constexpr int kBothHalves = sizeof(X) == sizeof(Compute) ? 8 : 2;

  // On the stack, as the sums are: a block's panels take three eighths of L2 (tactics.py).
  alignas(64) Compute unpacked[P][kBlockSteps * kAdvance];

  // acc[m][h] += block `number` of row m and half h; the block is kept, unpacked, in `kept`.
  template <int M, int H, class... Kept>
  static PELTON_INLINE void add_block(const X* const (&rows_of)[M], int64_t number,
                                      Half (&halves)[H], F32 (&acc)[M][H], Kept*... kept) {
    I32 pairs[H][kStepUnit];
    each<H>([&]<int HALF>() { halves[HALF].read(number, pairs[HALF]); });
    if constexpr (sizeof...(Kept) == H) {
      Compute* const to[H] = {kept...};
      for (int s = 0; s < kStepUnit; ++s) {
        for (int h = 0; h < H; ++h) {
          store_int(reinterpret_cast<int32_t*>(to[h] + s * kAdvance), pairs[h][s]);
        }
      }
    }
    for (int s = 0; s < kStepUnit; ++s) {
      I32 step[H];
      for (int h = 0; h < H; ++h) step[h] = pairs[h][s];
      Dot::times(rows_of, number * kStepUnit + s, step, acc);
    }
  }
  // Blocks first .. end - 1 of a tile; AHEAD: meanwhile memory at `ahead` is read ahead.
  template <bool AHEAD, int H, class... Kept>
  static PELTON_INLINE void add_blocks(const X* const (&rows_of)[M], int64_t first, int64_t end,
                                       Half (&halves)[H], F32 (&acc)[M][H],
                                       const char* const (&ahead)[kAhead], Kept*... kept) {
    constexpr int64_t kStored = kStepUnit * kAdvance;
    for (int64_t b = first; b < end; ++b) {
      const int64_t at = (b - first) * kStored;
      for (int a = 0; AHEAD && a < kAhead; ++a) {
        read_ahead<kStored * sizeof(Compute)>(ahead[a] + at * sizeof(Compute));
      }
      add_block(rows_of, b, halves, acc, kept + at...);
    }
  }
  template <int64_t BYTES>
  static PELTON_INLINE void read_ahead(const void* from) {
    for (int64_t line = 0; line < BYTES; line += 64) {
      __builtin_prefetch(static_cast<const char*>(from) + line, 0, 2);
    }
  }

  // M rows (those past the end repeat the last one and are not stored) times one panel.
  template <int M>
  __attribute__((noinline)) void stream(const X* ready, int64_t first_row, int64_t number) const {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    const uint8_t* from = Layout::panel(weight, number);
    F32 sums[M][2];
    if constexpr (M <= kBothHalves) {
      Half halves[2] = {Half(from, 0), Half(from, 1)};
      clear(sums);
      for (int64_t b = 0; b < Layout::kBlocks; ++b) {
        read_ahead<kPackedBlock>(halves[0].block(b) + (M <= 4 ? kNear : kFar));
        add_block(rows_of, b, halves, sums);
      }
    } else {
      // One half after the other, and the next panel is read ahead meanwhile, half of it each time.
      const uint8_t* next = from + Layout::kBytes;
      read_ahead<Layout::kFirstBlock>(next + Layout::kBlocks * kPackedBlock);
      each<2>([&]<int HALF>() {
        Half half[1] = {Half(from, HALF)};
        F32 acc[M][1];
        clear(acc);
        for (int64_t b = 0; b < Layout::kBlocks; ++b, next += kPackedHalf) {
          read_ahead<kPackedHalf>(next);
          add_block(rows_of, b, half, acc);
        }
        for (int m = 0; m < M; ++m) sums[m][HALF] = acc[m][0];
      });
    }
    finish_stream(sums, first_row, number);
  }

  // The panels of a tile, unpacked by the first one.
  PELTON_INLINE const Compute* tile_panel(int64_t, int64_t, int p) const { return unpacked[p]; }
  template <bool FIRST, bool LAST>
  PELTON_INLINE void tile(const X* ready, int64_t first_row, int64_t group, int64_t from,
                          F32 (&sums)[M][P], const char* const (&ahead)[kAhead], bool fresh) {
    if (fresh) return fresh_tile<FIRST, LAST>(ready, first_row, group, from, sums, ahead);
    Base::template tile_on<FIRST, LAST>(*this, ready, first_row, group, from, sums, ahead);
  }
  template <bool FIRST, bool LAST>
  __attribute__((noinline)) void fresh_tile(const X* ready, int64_t first_row, int64_t group,
                                            int64_t from, F32 (&sums)[M][P],
                                            const char* const (&ahead)[kAhead]) {
    constexpr int H = M <= kBothHalves ? 2 : 1;
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    const int64_t first = from / kStepUnit;
    const int64_t end = smaller<int64_t>(from + kBlockSteps, kSteps) / kStepUnit;
    F32 whole[M][P];
    each<P / H>([&]<int PART>() {
      constexpr int p = PART * H;
      const uint8_t* stored = Layout::panel(weight, (group * P + p) / 2);
      F32 acc[M][H];
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < H; ++h) acc[m][h] = FIRST ? zero() : sums[m][p + h];
      }
      Compute* const to = unpacked[p];
      if constexpr (H == 2) {
        Half halves[2] = {Half(stored, 0, first), Half(stored, 1, first)};
        add_blocks<PART == 0>(rows_of, first, end, halves, acc, ahead, to, unpacked[p + 1]);
      } else {
        Half half[1] = {Half(stored, p % 2, first)};
        add_blocks<PART == 0>(rows_of, first, end, half, acc, ahead, to);
      }
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < H; ++h) whole[m][p + h] = acc[m][h];
      }
    });
    Base::template leave<LAST>(whole, first_row, group, sums);
  }
};

}  // namespace pelton
