// The binary interface between the native runtime and compiled kernels (plain C layout).
//
// A code object is freestanding: it includes this header and the kernel templates, has no undefined
// symbols, and exports `extern "C" const uint32_t pelton_abi` plus one function per kernel.
// Everything a kernel needs from the runtime comes through these structs.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PELTON_ABI_VERSION 2u
#define PELTON_MAX_KV_GROUPS 4
#define PELTON_CACHE_LINE 64

// Sampling parameters and results, by row of R; see runtime/step.py for meanings.
typedef struct pelton_sampling {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const uint64_t* seed;
  const int32_t* num_logprobs;
  const int32_t* prompt_len;
  const int32_t* forced;
  const int32_t* bias_start;  // [R+1]
  const int32_t* bias_ids;
  const float* bias_values;
  const uint32_t* mask;  // [R, ceil(V/32)] or null
  // results
  int32_t* tokens;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;     // [R, max_logprobs]
  float* top_logprobs;  // [R, max_logprobs]
  float* logits;        // [R, V] or null
} pelton_sampling;

// One step. Dims and pointers are constant while the step runs, but for row_start and row_count,
// which the runtime sets for each turn of the plan's tail.
typedef struct pelton_step {
  int32_t num_tokens;          // T
  int32_t num_seqs;            // S
  int32_t num_rows;            // R
  int32_t row_start;           // first row of the current chunk
  int32_t row_count;           // C
  const int32_t* token_ids;    // [T]
  const int32_t* positions;    // [T]
  const int32_t* token_seq;    // [T] sequence of each token (filled by the runtime)
  const int32_t* query_start;  // [S+1]
  const int32_t* seq_slots;    // [S]
  const int32_t* logits_rows;  // [R]
  const int32_t* row_seq;      // [R]
  const int32_t* block_tables[PELTON_MAX_KV_GROUPS];  // [S, max_blocks]
  int32_t max_blocks;                                 // row stride of every block table
  pelton_sampling sampling;
} pelton_step;

// What a worker has left of work that is claimed while it is done (kernels/claims.h), on a cache
// line of its own. Zero at first; the runtime never looks at it.
typedef struct __attribute__((aligned(PELTON_CACHE_LINE))) pelton_unclaimed {
  uint64_t range;
} pelton_unclaimed;

// A worker of the thread team. All workers run every launch; worker 0 is the caller's thread.
typedef struct pelton_worker {
  int32_t index;
  int32_t count;
  void* team;
  void (*barrier)(struct pelton_worker*);  // every worker of the team meets; usable inside a kernel
  pelton_unclaimed* unclaimed;             // [count], shared
  uint32_t jobs;  // shared-out jobs (Claims) begun; equal in all workers between two launches
} pelton_worker;

// A kernel. `args`: inputs, outputs, states, scratch, in the launch's order ("none" operands are
// null).
typedef void (*pelton_kernel)(const pelton_step* step, void* const* args, pelton_worker* worker);

#ifdef __cplusplus
}
#endif
