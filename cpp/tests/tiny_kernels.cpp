// Small freestanding kernels that show what the runner does: order, barriers, chunks, inputs.
#include <stdint.h>

#include "pelton/abi.h"

#ifndef ABI
#define ABI PELTON_ABI_VERSION
#endif
#define KERNEL extern "C" __attribute__((visibility("default"))) void

extern "C" __attribute__((visibility("default"))) const uint32_t pelton_abi = ABI;

namespace {

constexpr int kCells = 4096;

int begin_of(const pelton_worker* w) { return kCells * w->index / w->count; }
int end_of(const pelton_worker* w) { return kCells * (w->index + 1) / w->count; }

// Appends (id, row_start, row_count) to a log: log[0] counts its entries.
void log_entry(const pelton_step* step, void* log, int32_t id, const pelton_worker* w) {
  if (w->index != 0) return;
  auto* cells = static_cast<int32_t*>(log);
  int32_t* entry = cells + 1 + 3 * cells[0]++;
  entry[0] = id;
  entry[1] = step->row_start;
  entry[2] = step->row_count;
}

}  // namespace

// args: log
KERNEL log_a(const pelton_step* s, void* const* args, pelton_worker* w) {
  log_entry(s, args[0], 1, w);
}
KERNEL log_b(const pelton_step* s, void* const* args, pelton_worker* w) {
  log_entry(s, args[0], 2, w);
}
KERNEL log_c(const pelton_step* s, void* const* args, pelton_worker* w) {
  log_entry(s, args[0], 3, w);
}

// args: counter cells [kCells]. Every worker adds 1 to its own part.
KERNEL bump(const pelton_step*, void* const* args, pelton_worker* w) {
  auto* cells = static_cast<int32_t*>(args[0]);
  for (int i = begin_of(w); i < end_of(w); ++i) cells[i]++;
}

// args: cells, errors [64]. Every worker looks at all cells: without the barrier before, some are
// old.
KERNEL check_equal(const pelton_step*, void* const* args, pelton_worker* w) {
  const auto* cells = static_cast<const int32_t*>(args[0]);
  auto* errors = static_cast<int32_t*>(args[1]);
  const int32_t wanted = cells[begin_of(w)];
  for (int i = 0; i < kCells; ++i) errors[w->index] += cells[i] != wanted;
}

// args: cells, errors. The same with barriers inside one kernel.
KERNEL bump_and_check(const pelton_step* s, void* const* args, pelton_worker* w) {
  bump(s, args, w);
  w->barrier(w);
  check_equal(s, args, w);
  w->barrier(w);
}

// args: bump's cells. One cell only: a launch that costs next to nothing.
KERNEL touch(const pelton_step*, void* const* args, pelton_worker* w) {
  static_cast<int32_t*>(args[0])[16 * w->index]++;
}

// args: token_ids, positions, none, out [4, T]: ids, positions, sequence of each token, 1 if none
// was null.
KERNEL show_inputs(const pelton_step* s, void* const* args, pelton_worker* w) {
  if (w->index != 0) return;
  auto* out = static_cast<int32_t*>(args[3]);
  for (int t = 0; t < s->num_tokens; ++t) {
    out[t] = static_cast<const int32_t*>(args[0])[t];
    out[s->num_tokens + t] = static_cast<const int32_t*>(args[1])[t];
    out[2 * s->num_tokens + t] = s->token_seq[t];
    out[3 * s->num_tokens + t] = args[2] == nullptr;
  }
}

// args: weight f32 [1]. Fills the chunk's rows: token = id + 1, logprob = weight, logits = row.
KERNEL tail(const pelton_step* s, void* const* args, pelton_worker* w) {
  if (w->index != w->count - 1) return;
  for (int r = s->row_start; r < s->row_start + s->row_count; ++r) {
    s->sampling.tokens[r] = s->token_ids[s->logits_rows[r]] + 1;
    s->sampling.logprobs[r] = *static_cast<const float*>(args[0]);
    s->sampling.ranks[r] = s->row_seq[r];
    if (s->sampling.logits != nullptr) s->sampling.logits[r * 10] = static_cast<float>(r);
  }
}

// args: out f32 [64]: 1 / 3 in the rounding mode of each worker.
KERNEL divide(const pelton_step*, void* const* args, pelton_worker* w) {
  auto* out = static_cast<float*>(args[0]);
  volatile float one = 1.0f, three = 3.0f;
  out[w->index] = one / three;
}
