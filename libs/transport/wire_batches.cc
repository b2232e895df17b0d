// The two messages that carry rows.
#include <algorithm>

#include "libs/transport/crc32c.h"
#include "libs/transport/wire.h"
#include "libs/transport/wire_bytes.h"

namespace conclave::wire {
namespace {

constexpr uint64_t kBatchFixed = 56;       // body before the arrays, of both kinds
constexpr uint32_t kMaxRowItems = 0xffff;  // experts of one row: its count is 16 bits
constexpr uint32_t kMaxMissing = 0x10000;  // expert ids are 16 bits and listed once

Status above(std::string_view field, uint64_t value, std::string_view bound, uint64_t limit) {
  return invalid_field(
      field, std::to_string(value) + " is above " + std::string(bound) + " = " + std::to_string(limit));
}

// Counts alone: no product here can overflow, since each factor is below 2^32 and a value has at most 4
// bytes.
Status check_shape(uint32_t rows, uint32_t items, uint32_t hidden, uint8_t dtype, uint64_t rows_bytes,
                   uint32_t output_rows, const TransportLimits& limits) {
  if (!known_row_dtype(dtype)) {
    return invalid_field("dtype", "unknown row dtype " + std::to_string(dtype));
  }
  if (rows > limits.max_rows) return above("rows", rows, "max_rows", limits.max_rows);
  if (items > limits.max_items) return above("items", items, "max_items", limits.max_items);
  if (hidden == 0) return invalid_field("hidden", "is zero");
  if (hidden > limits.max_hidden) return above("hidden", hidden, "max_hidden", limits.max_hidden);
  const uint64_t row = row_bytes(static_cast<RowDtype>(dtype), hidden);
  if (output_rows > limits.max_message_bytes / row) {
    return above("rows_bytes", uint64_t{output_rows}, "max_message_bytes / row bytes",
                 limits.max_message_bytes / row);
  }
  if (rows_bytes != row * output_rows) {
    return invalid_field("rows_bytes", "is " + std::to_string(rows_bytes) + ", the counts say " +
                                           std::to_string(row * output_rows));
  }
  return OkStatus();
}

uint64_t dispatch_body(uint64_t rows, uint64_t items) { return kBatchFixed + rows * 2 + items * 2; }
uint64_t combine_body(uint64_t items, uint64_t missing) { return kBatchFixed + items * 4 + missing * 2; }

bool strictly_ascending(const std::vector<uint32_t>& v) {
  return std::adjacent_find(v.begin(), v.end(), [](uint32_t a, uint32_t b) { return a >= b; }) == v.end();
}

size_t size_of(const RowBuffer& rows) { return rows ? rows->size() : 0; }
View view_of(const RowBuffer& rows) { return rows ? View(*rows) : View(); }

Status check_total(uint64_t bytes, const TransportLimits& limits) {
  if (bytes <= limits.max_message_bytes) return OkStatus();
  return above("message_bytes", bytes, "max_message_bytes", limits.max_message_bytes);
}

}  // namespace

Status validate(const DispatchBatch& b, const TransportLimits& limits) {
  if (b.expert_begin.size() > uint64_t{limits.max_rows} + 1) {
    return above("rows", b.expert_begin.size() - 1, "max_rows", limits.max_rows);
  }
  if (b.expert_ids.size() > limits.max_items) {
    return above("items", b.expert_ids.size(), "max_items", limits.max_items);
  }
  const auto items = static_cast<uint32_t>(b.expert_ids.size());
  RETURN_IF_ERROR(check_shape(b.row_count(), items, b.hidden, static_cast<uint8_t>(b.dtype), size_of(b.rows),
                              b.row_count(), limits));
  const uint32_t last = b.expert_begin.empty() ? 0 : b.expert_begin.back();
  const uint32_t first = b.expert_begin.empty() ? 0 : b.expert_begin.front();
  if (first != 0 || last != items) return invalid_field("expert_begin", "does not cover expert_ids");
  for (size_t i = 1; i < b.expert_begin.size(); ++i) {
    if (b.expert_begin[i] < b.expert_begin[i - 1]) return invalid_field("expert_begin", "descends");
    if (b.expert_begin[i] - b.expert_begin[i - 1] > kMaxRowItems) {
      return invalid_field("expert_begin", "a row has more than 65535 experts");
    }
  }
  if (!b.id.worker) return invalid_field("id.worker", "is zero");
  return check_total(message_bytes(b), limits);
}

Status validate(const CombineBatch& b, const TransportLimits& limits) {
  if (b.items.size() > limits.max_items) return above("items", b.items.size(), "max_items", limits.max_items);
  if (b.missing.size() > kMaxMissing) return above("missing", b.missing.size(), "experts", kMaxMissing);
  const auto items = static_cast<uint32_t>(b.items.size());
  RETURN_IF_ERROR(
      check_shape(0, items, b.hidden, static_cast<uint8_t>(b.dtype), size_of(b.outputs), items, limits));
  if (!strictly_ascending(b.items)) return invalid_field("items", "must ascend");
  if (items > 0 && b.items.back() >= limits.max_items) {
    return above("items", b.items.back(), "max_items - 1", limits.max_items - 1);
  }
  if (!b.id.worker) return invalid_field("id.worker", "is zero");
  return check_total(message_bytes(b), limits);
}

uint64_t message_bytes(const DispatchBatch& b) {
  return kFixedBytes + pad8(dispatch_body(b.row_count(), b.expert_ids.size())) + size_of(b.rows);
}

uint64_t message_bytes(const CombineBatch& b) {
  return kFixedBytes + pad8(combine_body(b.items.size(), b.missing.size())) + size_of(b.outputs);
}

void encode(const Envelope& envelope, const DispatchBatch& b, bool rows_crc, Bytes& out,
            std::span<const Section> sections) {
  Writer w(out);
  begin(w, Kind::kDispatch, envelope);
  w.put(b.id.worker.value);
  w.put(b.id.seq);
  w.put(b.epoch.value);
  w.put(static_cast<int64_t>(b.time_left < 0 ? 1 : b.time_left));  // past its deadline is not "no deadline"
  w.put(b.layer);
  w.put(b.hidden);
  w.put(b.row_count());
  w.put(static_cast<uint32_t>(b.expert_ids.size()));
  w.put(static_cast<uint8_t>(b.dtype));
  w.zeros(7);
  for (size_t i = 1; i < b.expert_begin.size(); ++i) {
    w.put(static_cast<uint16_t>(b.expert_begin[i] - b.expert_begin[i - 1]));
  }
  w.append(b.expert_ids.data(), b.expert_ids.size() * 2);
  w.pad8();
  const uint32_t extra = append_sections(w, sections);
  finish(out, size_of(b.rows), rows_crc, rows_crc ? crc32c(view_of(b.rows)) : 0, extra);
}

Status decode(const Header& h, View header, const TransportLimits& limits, DispatchBatch& out) {
  if (h.kind != Kind::kDispatch) return invalid_field("kind", "not a dispatch");
  if (header.size() < kFixedBytes + kBatchFixed) {
    return invalid_field("header_bytes", "too short for a dispatch");
  }
  Reader r(header, kFixedBytes);
  out.id.worker = Incarnation(r.get<uint64_t>());
  out.id.seq = r.get<uint64_t>();
  out.epoch = Epoch(r.get<uint64_t>());
  out.time_left = r.get<int64_t>();
  out.layer = r.get<uint32_t>();
  out.hidden = r.get<uint32_t>();
  const auto rows = r.get<uint32_t>();
  const auto items = r.get<uint32_t>();
  const auto dtype = r.get<uint8_t>();
  r.skip(7);
  RETURN_IF_ERROR(check_shape(rows, items, out.hidden, dtype, h.rows_bytes, rows, limits));
  RETURN_IF_ERROR(expect_body(h, dispatch_body(rows, items)));
  if (!out.id.worker) return invalid_field("id.worker", "is zero");
  if (out.time_left < 0) return invalid_field("time_left", "is negative");
  out.dtype = static_cast<RowDtype>(dtype);
  out.expert_begin.resize(rows == 0 ? 0 : rows + 1);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < rows; ++i) {
    out.expert_begin[i] = static_cast<uint32_t>(sum);
    sum += r.get<uint16_t>();
    if (sum > items) return invalid_field("row_items", "the rows' counts exceed items");
  }
  if (sum != items) return invalid_field("row_items", "the rows' counts fall short of items");
  if (rows > 0) out.expert_begin[rows] = items;
  out.expert_ids.resize(items);
  r.copy(out.expert_ids.data(), items * size_t{2});
  return OkStatus();
}

void encode(const Envelope& envelope, const CombineBatch& b, bool rows_crc, Bytes& out,
            std::span<const Section> sections) {
  Writer w(out);
  begin(w, Kind::kCombine, envelope);
  w.put(b.id.worker.value);
  w.put(b.id.seq);
  w.put(b.shard.value);
  w.put(static_cast<int64_t>(b.compute_ns));
  w.put(b.layer);
  w.put(b.hidden);
  w.put(static_cast<uint32_t>(b.items.size()));
  w.put(static_cast<uint32_t>(b.missing.size()));
  w.put(static_cast<uint8_t>(b.dtype));
  w.zeros(7);
  w.append(b.items.data(), b.items.size() * 4);
  w.append(b.missing.data(), b.missing.size() * 2);
  w.pad8();
  const uint32_t extra = append_sections(w, sections);
  finish(out, size_of(b.outputs), rows_crc, rows_crc ? crc32c(view_of(b.outputs)) : 0, extra);
}

Status decode(const Header& h, View header, const TransportLimits& limits, CombineBatch& out) {
  if (h.kind != Kind::kCombine) return invalid_field("kind", "not a combine");
  if (header.size() < kFixedBytes + kBatchFixed) {
    return invalid_field("header_bytes", "too short for a combine");
  }
  Reader r(header, kFixedBytes);
  out.id.worker = Incarnation(r.get<uint64_t>());
  out.id.seq = r.get<uint64_t>();
  out.shard = Incarnation(r.get<uint64_t>());
  out.compute_ns = r.get<int64_t>();
  out.layer = r.get<uint32_t>();
  out.hidden = r.get<uint32_t>();
  const auto items = r.get<uint32_t>();
  const auto missing = r.get<uint32_t>();
  const auto dtype = r.get<uint8_t>();
  r.skip(7);
  RETURN_IF_ERROR(check_shape(0, items, out.hidden, dtype, h.rows_bytes, items, limits));
  if (missing > kMaxMissing) return above("missing", missing, "experts", kMaxMissing);
  RETURN_IF_ERROR(expect_body(h, combine_body(items, missing)));
  if (!out.id.worker) return invalid_field("id.worker", "is zero");
  out.dtype = static_cast<RowDtype>(dtype);
  out.items.resize(items);
  r.copy(out.items.data(), items * size_t{4});
  out.missing.resize(missing);
  r.copy(out.missing.data(), missing * size_t{2});
  if (!strictly_ascending(out.items)) return invalid_field("items", "must ascend");
  if (items > 0 && out.items.back() >= limits.max_items) {
    return above("items", out.items.back(), "max_items - 1", limits.max_items - 1);
  }
  return OkStatus();
}

}  // namespace conclave::wire
