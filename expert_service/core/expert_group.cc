#include "expert_service/core/expert_group.h"

#include <algorithm>
#include <string>

#include "libs/model/fp8_rows.h"

namespace conclave {

ExpertGroup::ExpertGroup(uint32_t num_experts, Precision precision, bool fp8_wire)
    : out_dtype_(row_dtype(precision)), fp8_wire_(fp8_wire), lists_(num_experts) {}

void ExpertGroup::build(std::span<const WaitingDispatch> taken, const ExpertStore& store, Incarnation shard,
                        RowPool& pool) {
  for (uint16_t expert : touched_) {
    lists_[expert].in.clear();
    lists_[expert].out.clear();
  }
  touched_.clear();
  jobs_.clear();
  reply_count_ = 0;
  decoded_.clear();
  items_ = 0;
  missing_items_ = 0;

  for (const WaitingDispatch& waiting : taken) {
    const DispatchBatch& batch = waiting.batch;
    if (reply_count_ == replies_.size()) replies_.emplace_back();
    CombineBatch& reply = replies_[reply_count_++];
    reply.items.clear();
    reply.missing.clear();
    reply.id = batch.id;
    reply.shard = shard;
    reply.layer = batch.layer;
    reply.hidden = batch.hidden;
    reply.dtype = out_dtype_;
    for (uint32_t item = 0; item < batch.expert_ids.size(); ++item) {
      const uint16_t expert = batch.expert_ids[item];
      if (store.holds(batch.layer, expert)) {
        reply.items.push_back(item);
      } else {
        ++missing_items_;
        reply.missing.push_back(expert);
      }
    }
    std::sort(reply.missing.begin(), reply.missing.end());
    reply.missing.erase(std::unique(reply.missing.begin(), reply.missing.end()), reply.missing.end());

    const size_t out_bytes = reply.row_bytes();
    reply.outputs = pool.get(reply.items.size() * out_bytes);
    items_ += reply.items.size();
    std::byte* out = reply.outputs->data();
    const std::byte* rows = batch.rows->data();
    size_t row_size = batch.row_bytes();
    if (fp8_wire_) {
      const size_t bf16_row = row_bytes(RowDtype::kBf16, batch.hidden);
      decoded_.push_back(pool.get(batch.row_count() * bf16_row));
      std::byte* to = decoded_.back()->data();
      for (uint32_t row = 0; row < batch.row_count(); ++row) {
        decode_fp8_row(rows + row * row_size, batch.hidden, reinterpret_cast<Bf16*>(to + row * bf16_row));
      }
      rows = to;
      row_size = bf16_row;
    }
    size_t next = 0;  // into reply.items
    for (uint32_t row = 0; row < batch.row_count(); ++row) {
      const std::byte* in = rows + row * row_size;
      for (; next < reply.items.size() && reply.items[next] < batch.expert_begin[row + 1]; ++next) {
        const uint16_t expert = batch.expert_ids[reply.items[next]];
        if (lists_[expert].in.empty()) touched_.push_back(expert);
        lists_[expert].in.push_back(in);
        lists_[expert].out.push_back(out);
        out += out_bytes;
      }
    }
  }
  // Ascending ids walk the mapped file in one direction.
  std::sort(touched_.begin(), touched_.end());
  for (uint16_t expert : touched_) {
    const Rows& rows = lists_[expert];
    jobs_.push_back({&store.weights(taken.front().batch.layer, expert), rows.in.data(), rows.out.data(),
                     static_cast<uint32_t>(rows.in.size())});
  }
}

Status check_dispatch(const DispatchBatch& batch, uint32_t layers, uint32_t num_experts, uint32_t hidden,
                      RowDtype wire_dtype) {
  if (batch.layer >= layers) {
    return invalid_field("dispatch.layer", std::to_string(batch.layer) + " of " + std::to_string(layers));
  }
  if (batch.hidden != hidden) {
    return invalid_field("dispatch.hidden", std::to_string(batch.hidden) + ", not " + std::to_string(hidden));
  }
  if (batch.dtype != wire_dtype) return invalid_field("dispatch.dtype", "not this fleet's precision");
  if (batch.row_count() == 0) return invalid_field("dispatch.rows", "none");
  if (batch.expert_begin.front() != 0 || batch.expert_begin.back() != batch.expert_ids.size() ||
      !std::is_sorted(batch.expert_begin.begin(), batch.expert_begin.end())) {
    return invalid_field("dispatch.expert_begin", "not ascending offsets into expert_ids");
  }
  for (uint16_t expert : batch.expert_ids) {
    if (expert >= num_experts) {
      return invalid_field("dispatch.expert_ids",
                           std::to_string(expert) + " of " + std::to_string(num_experts));
    }
  }
  if (batch.rows == nullptr || batch.rows->size() != batch.row_count() * batch.row_bytes()) {
    return invalid_field("dispatch.rows", "wrong number of bytes");
  }
  return OkStatus();
}

}  // namespace conclave
