// Picking rows: of an embedding table (row-major or in weight panels), and of the step's tokens.
#pragma once
#include "packed12.h"
#include "vec.h"
#include "work.h"

namespace pelton {

// args: ids, table, out. C: Id, Table, Out, kRows, kWidth, kPanels (table in panel16), kPacked
// (table in packed12), kScale.
// Work is cut into pieces of columns, so that one token also keeps several workers busy. An id
// outside the table gives a row of NaN.
template <class C>
struct Embedding {
  using Table = typename C::Table;
  using Out = typename C::Out;
  static constexpr int64_t kPiece = 256;
  static constexpr int64_t kPieces = divide_up(C::kWidth, kPiece);
  static constexpr int64_t kPair = sizeof(Table) == 2 ? 2 : 1;
  static constexpr int64_t kRowOfPanel = divide_up(C::kWidth, kPair) * kPair * kLanes;

  static PELTON_INLINE F32 values(const Table* table, int64_t id, int64_t column, int n) {
    if constexpr (C::kPanels) {
      const Table* from = table + id / kLanes * kRowOfPanel + id % kLanes * kPair;
      float x[kLanes];
      for (int i = 0; i < n; ++i) {
        const int64_t k = column + i;
        x[i] = to_float(from[k / kPair * kPair * kLanes + k % kPair]);
      }
      return load_n(x, n);
    } else {
      return load_n(table + id * C::kWidth + column, n);
    }
  }

  static PELTON_INLINE void piece(const Table* table, int64_t id, int64_t first, Out* out) {
    const int64_t end = smaller(first + kPiece, int64_t{C::kWidth});
    const bool known = id >= 0 && id < C::kRows;
    alignas(64) bf16 unpacked[kPiece];
    if constexpr (C::kPacked) {
      if (known) Packed12<C::kWidth>::row(table, id, first, end, unpacked);
    }
    for (int64_t column = first; column < end; column += kLanes) {
      const int n = static_cast<int>(smaller<int64_t>(end - column, kLanes));
      F32 v = splat(__builtin_nanf(""));
      if (known) {
        if constexpr (C::kPacked) {
          v = load_n(unpacked + (column - first), n);
        } else {
          v = values(table, id, column, n);
        }
      }
      if constexpr (C::kScale != 1.0f) v *= splat(C::kScale);
      store_n(out + column, v, n);
    }
  }
};

template <class C>
PELTON_INLINE void embedding(void* const* args, pelton_worker* worker, int64_t count) {
  using E = Embedding<C>;
  const Range mine = share(count * E::kPieces, worker);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t row = i / E::kPieces;
    E::piece(static_cast<const typename C::Table*>(args[1]),
             static_cast<const typename C::Id*>(args[0])[row], i % E::kPieces * E::kPiece,
             static_cast<typename C::Out*>(args[2]) + row * C::kWidth);
  }
}

// args: x, out. Rows logits_rows[row_start ...] of x [T, kWidth]; the element type plays no part.
template <class C>
PELTON_INLINE void gather_rows(const pelton_step* step, void* const* args, pelton_worker* worker) {
  using T = typename C::T;
  const Range mine = share(step->row_count, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t token = step->logits_rows[step->row_start + row];
    const T* from = static_cast<const T*>(args[0]) + token * C::kWidth;
    T* to = static_cast<T*>(args[1]) + row * C::kWidth;
    for (int64_t i = 0; i < C::kWidth; ++i) to[i] = from[i];
  }
}

}  // namespace pelton
