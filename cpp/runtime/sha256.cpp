#include "sha256.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pelton {
namespace {

constexpr size_t kBlock = 64;

// First 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

struct State {
  // And of the square roots of the first 8.
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
};

uint32_t big_endian(const std::byte* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return std::endian::native == std::endian::little ? __builtin_bswap32(word) : word;
}

void portable_blocks(State& state, const std::byte* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += kBlock) {
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = big_endian(data + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state.h;
    for (int t = 0; t < 64; ++t) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t added[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state.h[i] += added[i];
  }
}

#if defined(__x86_64__)

bool has_sha_instructions() {
  static const bool result = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__builtin_cpu_supports("sse4.1")) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
  }();
  return result;
}

// ``N`` messages in step, the same number of blocks of each.
template <int N>
__attribute__((target("sha,sse4.1"))) void sha_blocks(State* const* states,
                                                      const std::byte* const* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions keep the eight words as (a b e f) and (c d g h), highest first.
  __m128i abef[N], cdgh[N];
  for (int n = 0; n < N; ++n) {
    uint32_t h[8];
    std::memcpy(h, states[n]->h, sizeof h);
    abef[n] = _mm_set_epi32(static_cast<int>(h[0]), static_cast<int>(h[1]), static_cast<int>(h[4]),
                            static_cast<int>(h[5]));
    cdgh[n] = _mm_set_epi32(static_cast<int>(h[2]), static_cast<int>(h[3]), static_cast<int>(h[6]),
                            static_cast<int>(h[7]));
  }
  for (size_t block = 0; block < blocks; ++block) {
    __m128i w[N][4], before_abef[N], before_cdgh[N];
    for (int n = 0; n < N; ++n) {
      before_abef[n] = abef[n], before_cdgh[n] = cdgh[n];
      const auto* from = reinterpret_cast<const __m128i*>(data[n] + block * kBlock);
      for (int i = 0; i < 4; ++i) w[n][i] = _mm_shuffle_epi8(_mm_loadu_si128(from + i), swap);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        __m128i& now = w[n][i % 4];  // words 4i to 4i+3; before, those 16 earlier
        if (i >= 4) {
          const __m128i last = w[n][(i + 3) % 4];
          now = _mm_sha256msg1_epu32(now, w[n][(i + 1) % 4]);
          now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[n][(i + 2) % 4], 4));
          now = _mm_sha256msg2_epu32(now, last);
        }
        const auto* round = reinterpret_cast<const __m128i*>(kRound + 4 * i);
        const __m128i k = _mm_add_epi32(now, _mm_load_si128(round));
        cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], k);
        abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(k, 0x0e));
      }
    }
    for (int n = 0; n < N; ++n) {
      abef[n] = _mm_add_epi32(abef[n], before_abef[n]);
      cdgh[n] = _mm_add_epi32(cdgh[n], before_cdgh[n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    uint32_t x[4], y[4];
    std::memcpy(x, &abef[n], sizeof x);
    std::memcpy(y, &cdgh[n], sizeof y);
    const uint32_t h[8] = {x[3], x[2], y[3], y[2], x[1], x[0], y[1], y[0]};
    std::memcpy(states[n]->h, h, sizeof h);
  }
}

#endif

void add_blocks(State& state, const std::byte* data, size_t blocks, bool portable) {
#if defined(__x86_64__)
  if (!portable && has_sha_instructions()) {
    State* const states[] = {&state};
    return sha_blocks<1>(states, &data, blocks);
  }
#endif
  (void)portable;
  portable_blocks(state, data, blocks);
}

// The last bytes, the end mark and the length.
Digest finish(State& state, std::span<const std::byte> data, bool portable) {
  const size_t rest = data.size() % kBlock;
  std::byte tail[2 * kBlock] = {};
  if (rest > 0) std::memcpy(tail, data.data() + (data.size() - rest), rest);
  tail[rest] = std::byte{0x80};
  const size_t blocks = rest + 9 > kBlock ? 2 : 1;
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (size_t i = 0; i < 8; ++i) {
    tail[blocks * kBlock - 1 - i] = static_cast<std::byte>(bits >> (8 * i) & 0xff);
  }
  add_blocks(state, tail, blocks, portable);
  Digest digest;
  for (size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<uint8_t>(state.h[i / 4] >> (24 - 8 * (i % 4)) & 0xff);
  }
  return digest;
}

}  // namespace

Digest sha256(std::span<const std::byte> data, bool portable) {
  State state;
  add_blocks(state, data.data(), data.size() / kBlock, portable);
  return finish(state, data, portable);
}

std::array<Digest, 2> sha256_pair(const std::byte* first, const std::byte* second, size_t nbytes) {
#if defined(__x86_64__)
  if (has_sha_instructions()) {
    State states[2];
    State* const pointers[] = {&states[0], &states[1]};
    const std::byte* const data[] = {first, second};
    sha_blocks<2>(pointers, data, nbytes / kBlock);
    return {finish(states[0], {first, nbytes}, false), finish(states[1], {second, nbytes}, false)};
  }
#endif
  return {sha256({first, nbytes}), sha256({second, nbytes})};
}

}  // namespace pelton
