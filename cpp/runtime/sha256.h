// SHA-256, for the hash tree over an engine's weights.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pelton {

using Digest = std::array<uint8_t, 32>;

// Uses the CPU's SHA instructions where it has them; ``portable`` leaves them alone (for tests).
Digest sha256(std::span<const std::byte> data, bool portable = false);

// Hashes of two messages of the same length. One message leaves most of the CPU's SHA unit idle
// (each round waits for the last), so two at once take little longer than one.
std::array<Digest, 2> sha256_pair(const std::byte* first, const std::byte* second, size_t nbytes);

}  // namespace pelton
