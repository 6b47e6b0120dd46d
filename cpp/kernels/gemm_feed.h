// Brings panels of a weight, two at a time, to where the core has them at hand: packed12 unpacked,
// panel16 as it is, both padded with zeros to whole steps.
#pragma once
#include "packed12.h"

namespace pelton {

// Rows is the GemmRows of C, whose weight is in bf16.
template <class C, class Rows>
class PanelFeed {
 public:
  static constexpr int kDepth = 8;                    // values of k in a piece
  static constexpr int kVectors = kDepth / 2;         // of each panel
  static constexpr int64_t kPiece = kDepth * kLanes;  // elements of each panel
  static constexpr int64_t kPieces = divide_up(Rows::kSteps * Rows::Dot::kStep, kDepth);
  static_assert(!C::kPacked || kDepth == kPackedDepth);

  PELTON_INLINE explicit PanelFeed(const bf16* weight) : source_(weight) {}

  // The next piece is `piece` of panels 2 x pair and 2 x pair + 1.
  PELTON_INLINE void begin(int64_t pair, int64_t piece) {
    source_.begin(pair, piece);
    next_ = piece;
  }

  // Brings one piece.
  PELTON_INLINE void take(bf16* first, bf16* second) {
    bf16* const to[2] = {first, second};
    each<2>([&]<int PANEL>() {
      I32 pairs[kVectors];
      if (kWhole || next_ < kStored) {
        source_.template read<PANEL>(next_, pairs);
      } else {
        for (I32& pair : pairs) pair = splat_int(0);
      }
      for (int v = 0; v < kVectors; ++v) {
        store_int(reinterpret_cast<int32_t*>(to[PANEL] + v * 2 * kLanes), pairs[v]);
      }
    });
    ++next_;
  }

 private:
  static constexpr int64_t kStored = divide_up(C::kK, kDepth);  // pieces that a panel has
  static constexpr bool kWhole = kStored == kPieces;
  // How many bytes are read ahead, into L2 and from there into L1: with either alone a Sapphire
  // Rapids reads four fifths as fast. Each line just before or after the load of one: after a burst
  // of prefetches, or with lines loaded in another order than theirs, it reads half as fast.
  static constexpr int kFar = 4096, kNear = 1536;

  struct Packed {
    PELTON_INLINE explicit Packed(const bf16* from) : weight(from) {}
    PELTON_INLINE void begin(int64_t pair, int64_t piece) {
      const uint8_t* panel = Packed12<C::kK>::panel(weight, pair);
      each<2>([&]<int H>() { half[H] = PackedHalf<C::kK>(panel, H, piece); });
    }
    template <int PANEL>
    PELTON_INLINE void read(int64_t piece, I32 (&pairs)[kVectors]) {
      half[PANEL].template read_in_order<kFar, kNear>(piece, pairs);
    }
    const bf16* weight;
    PackedHalf<C::kK> half[2];
  };

  struct Plain {
    PELTON_INLINE explicit Plain(const bf16* from) : weight(from) {}
    PELTON_INLINE void begin(int64_t pair, int64_t) {
      for (int p = 0; p < 2; ++p) {
        const int64_t which = 2 * pair + p;
        panel[p] = which < Rows::kPanels ? weight + which * Rows::kPanel : nullptr;
      }
    }
    template <int PANEL>
    PELTON_INLINE void read(int64_t piece, I32 (&pairs)[kVectors]) {
      const bf16* from = panel[PANEL];
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = piece * kPiece + v * 2 * kLanes;
        const bool there = from != nullptr && (kEven || at < Rows::kPanel);
        if (there) prefetch_far_and_near<kFar, kNear>(from + at);
        pairs[v] = there ? load_int(reinterpret_cast<const int32_t*>(from + at)) : splat_int(0);
      }
    }
    static constexpr bool kEven = C::kK % kDepth == 0;
    const bf16* weight;
    const bf16* panel[2] = {};
  };

  typename Choose<Packed, Plain, C::kPacked>::Type source_;
  int64_t next_ = 0;
};

}  // namespace pelton
