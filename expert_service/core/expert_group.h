// Turns waiting dispatches of one layer into one job per expert and one reply per dispatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "expert_service/core/dispatch_queue.h"
#include "expert_service/core/expert_store.h"
#include "libs/kernels/ops.h"
#include "libs/model/row_pool.h"

namespace conclave {

class ExpertGroup {
 public:
  ExpertGroup(uint32_t num_experts, Precision precision, bool fp8_wire);

  // Builds jobs and replies (in the order of `taken`, outputs allocated, nothing computed). Pointers lead
  // into the rows of `taken`, which must live until the jobs ran, or into BF16 copies where they came as FP8.
  // Experts that `store` lacks go to the replies' missing ids. `shard` signs the replies.
  void build(std::span<const WaitingDispatch> taken, const ExpertStore& store, Incarnation shard,
             RowPool& pool);

  std::span<const kernels::ExpertJob> jobs() const { return jobs_; }
  // Theirs until the next build(), which uses the memory of those that are still there.
  std::span<CombineBatch> replies() { return std::span(replies_).first(reply_count_); }
  uint64_t items() const { return items_; }
  uint64_t missing_items() const { return missing_items_; }
  // Calls f(expert, rows) for each job.
  template <class F>
  void each_expert(F f) const {
    for (uint16_t expert : touched_) f(expert, lists_[expert].in.size());
  }

 private:
  struct Rows {
    std::vector<const std::byte*> in;
    std::vector<std::byte*> out;
  };

  const RowDtype out_dtype_;
  const bool fp8_wire_;
  std::vector<RowBuffer> decoded_;  // of the dispatches of this group
  std::vector<Rows> lists_;         // by expert
  std::vector<uint16_t> touched_;   // experts with rows, ascending once built
  std::vector<kernels::ExpertJob> jobs_;
  std::vector<CombineBatch> replies_;  // the first reply_count_ of this group
  size_t reply_count_ = 0;
  uint64_t items_ = 0;
  uint64_t missing_items_ = 0;
};

// Whether a dispatch makes sense for this model: layer, width, dtype, offsets, expert ids, bytes. Names what
// is wrong.
Status check_dispatch(const DispatchBatch& batch, uint32_t layers, uint32_t num_experts, uint32_t hidden,
                      RowDtype wire_dtype);

}  // namespace conclave
