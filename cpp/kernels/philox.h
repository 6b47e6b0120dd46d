// Philox4x32-10, the counter-based random number generator of Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3" (2011).
#pragma once
#include <stdint.h>

namespace pelton {

struct PhiloxBlock {
  uint32_t word[4];
};

inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random number of a new token, times 2^24: the top 24 bits of the first word at counter
// (position, 0, 0, 0) with the seed as key.
inline uint32_t uniform24(uint64_t seed, int32_t position) {
  const PhiloxBlock counter{{static_cast<uint32_t>(position), 0, 0, 0}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32))
             .word[0] >>
         8;
}

}  // namespace pelton
