// Weights of layout packed12 (docs/engine_format.md): bf16 in 12 bits, every value as it was.
//
// A panel has 32 outputs in two halves. 16 high bytes are named by 4 bits each (its table); an
// element with another high byte is an exception, listed with its place. Blocks of 8 values of k
// follow: for each half two lines of low bytes and one of names.
#pragma once
#include "vec.h"
#include "work.h"

namespace pelton {

inline constexpr int kPackedOutputs = 32, kPackedDepth = 8;
inline constexpr int64_t kPackedHalf = 192, kPackedBlock = 2 * kPackedHalf;

// An entry of a list of exceptions. Unused ones name a block that there never is. The place is that
// of the low byte in the half's two lines.
struct Exception {
  static PELTON_INLINE int64_t block(uint32_t entry) { return entry >> 15; }
  static PELTON_INLINE int place(uint32_t entry) { return entry >> 8 & 127; }
  static PELTON_INLINE uint8_t high(uint32_t entry) { return entry & 255; }
};

// Where things lie in a panel with K values of k for each output.
template <int64_t K>
struct Packed12 {
  static_assert(K > 0 && K < 1 << 20 && K % kPackedDepth == 0);
  static constexpr int64_t kBlocks = K / kPackedDepth;
  static constexpr int64_t kTable = 64;
  static constexpr int64_t kCapacity = round_up(K / 32 + 1, 16);  // exceptions of a half
  static constexpr int64_t kFirstBlock = kTable + 2 * kCapacity * sizeof(uint32_t);
  static constexpr int64_t kBytes = kFirstBlock + kBlocks * kPackedBlock;

  // A row has a few bytes in each of a block's three lines, which no hardware foresees.
  static constexpr int64_t kRowAhead = 8;  // blocks
  static PELTON_INLINE void fetch(const uint8_t* block) {
    for (int line = 0; line < 3; ++line) __builtin_prefetch(block + 64 * line);
  }

  static PELTON_INLINE const uint8_t* panel(const void* weight, int64_t number) {
    return static_cast<const uint8_t*>(weight) + number * kBytes;
  }
  static PELTON_INLINE const uint32_t* exceptions(const uint8_t* panel, int64_t half) {
    return reinterpret_cast<const uint32_t*>(panel + kTable) + half * kCapacity;
  }

  // Where an element of a half is in a block: pairs of k go by four, four columns of one pair at a
  // time, so that 16 bytes hold those of two pairs.
  static PELTON_INLINE int place_of(int64_t column, int64_t k) {
    const int64_t pair = k / 2, i = 2 * column + k % 2;
    return static_cast<int>(pair / 2 * 64 + i / 8 * 16 + pair % 2 * 8 + i % 8);
  }

  // Values k = first .. end - 1 of one output of a weight; both are multiples of kPackedDepth.
  static PELTON_INLINE void row(const void* weight, int64_t output, int64_t first, int64_t end,
                                bf16* out) {
    const uint8_t* panel = Packed12::panel(weight, output / kPackedOutputs);
    const int64_t half = output % kPackedOutputs / kLanes, column = output % kLanes;
    const uint8_t* block = panel + kFirstBlock + half * kPackedHalf +
                           first / kPackedDepth * kPackedBlock + place_of(column, 0);
    for (int64_t ahead = 0; ahead < kRowAhead; ++ahead) fetch(block + ahead * kPackedBlock);
    for (int64_t k = first; k < end; k += kPackedDepth, block += kPackedBlock) {
      fetch(block + kRowAhead * kPackedBlock);
      for (int i = 0; i < kPackedDepth; ++i) {
        const int place = place_of(0, i);  // beside that of the column's first value
        const int name = block[128 + place % 64] >> place / 64 * 4 & 15;
        out[k - first + i].bits = static_cast<uint16_t>(panel[name] << 8 | block[place]);
      }
    }
    const uint32_t* entry = exceptions(panel, half);
    for (const uint32_t* stop = entry + kCapacity; entry < stop; ++entry) {
      const int64_t from = Exception::block(*entry) * kPackedDepth;
      if (from >= end) break;
      for (int64_t k = larger(from, first); k < smaller(from + kPackedDepth, end); ++k) {
        if (place_of(column, k - from) != Exception::place(*entry)) continue;
        uint16_t& bits = out[k - first].bits;
        bits = static_cast<uint16_t>(Exception::high(*entry) << 8 | (bits & 255));
      }
    }
  }
};

// One half of a panel, whose blocks are read in ascending order.
template <int64_t K>
class PackedHalf {
  using Layout = Packed12<K>;

 public:
  PackedHalf() = default;
  PELTON_INLINE PackedHalf(const uint8_t* panel, int64_t half, int64_t from = 0)
      : blocks_(panel + Layout::kFirstBlock + half * kPackedHalf),
        next_(Layout::exceptions(panel, half)),
        end_(next_ + Layout::kCapacity),
        table_(repeat_16_bytes(panel)) {
    while (next_ < end_ && Exception::block(*next_) < from) ++next_;
    seek();
  }

  PELTON_INLINE const uint8_t* block(int64_t number) const {
    return blocks_ + number * kPackedBlock;
  }

  // Four vectors of pairs of k [16][2], as panel16 has them.
  PELTON_INLINE void read(int64_t number, I32 (&pairs)[4]) {
    const auto* from = reinterpret_cast<const int32_t*>(block(number));
    const I32 names = load_int(from + 32);
    const I32 low[2] = {load_int(from), load_int(from + 16)};
    combine(number, low, names, pairs);
  }
  // The same line by line in order, and with each line others are read ahead.
  template <int FAR, int NEAR>
  PELTON_INLINE void read_in_order(int64_t number, I32 (&pairs)[4]) {
    const uint8_t* from = block(number);
    I32 line[3];
    for (int i = 0; i < 3; ++i) {
      prefetch_far_and_near<FAR, NEAR>(from + 64 * i);
      line[i] = load_int(reinterpret_cast<const int32_t*>(from + 64 * i));
      stay_in_order(line[i]);
    }
    combine(number, {line[0], line[1]}, line[2], pairs);
  }

 private:
  PELTON_INLINE void combine(int64_t number, const I32 (&low)[2], I32 names, I32 (&pairs)[4]) {
    const I32 nibble = splat_int(0x0f0f0f0f);
    I32 high[2] = {lookup_bytes(table_, names & nibble),
                   lookup_bytes(table_, shift_right<4>(names) & nibble)};
    if (__builtin_expect(number == special_, 0)) mend(high);
    for (int i = 0; i < 2; ++i) {
      pairs[2 * i] = interleave_low(low[i], high[i]);
      pairs[2 * i + 1] = interleave_high(low[i], high[i]);
    }
  }
  PELTON_INLINE void seek() { special_ = next_ < end_ ? Exception::block(*next_) : -1; }

  PELTON_INLINE void mend(I32 (&high)[2]) {
    for (; next_ < end_ && Exception::block(*next_) == special_; ++next_) {
      const int place = Exception::place(*next_);
      high[0] = set_byte(high[0], place, Exception::high(*next_));
      high[1] = set_byte(high[1], place - 64, Exception::high(*next_));
    }
    seek();
  }

  const uint8_t* blocks_ = nullptr;
  const uint32_t *next_ = nullptr, *end_ = nullptr;
  int64_t special_ = -1;  // the next block with an exception
  I32 table_ = {};
};

}  // namespace pelton
