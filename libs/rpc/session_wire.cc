#include "libs/rpc/session_wire.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "libs/base/check.h"
#include "libs/rpc/convert.h"
#include "libs/rpc/convert_checks.h"

namespace conclave::rpc {
namespace {

static_assert(std::endian::native == std::endian::little, "fixed-width fields are copied as they are");

// --- writing

size_t varint_size(uint64_t value) {
  return (static_cast<size_t>(std::bit_width(value | 1)) * 9 + 64) / 64;  // ceil(bits / 7) up to 64 bits
}

// A field number below 16 with its wire type.
constexpr char tag(int field, int type) { return static_cast<char>(field << 3 | type); }
constexpr int kVarint = 0;
constexpr int kLength = 2;

// Of a field with a length; without content it is left out.
size_t field_size(size_t content) { return content == 0 ? 0 : 1 + varint_size(content) + content; }

// Writes what was counted before; the caller checks that it was.
struct Writer {
  char* at;

  void varint(uint64_t value) {
    while (value >= 0x80) {
      *at++ = static_cast<char>(value | 0x80);
      value >>= 7;
    }
    *at++ = static_cast<char>(value);
  }
  void fixed64(uint64_t value) {
    std::memcpy(at, &value, sizeof value);
    at += sizeof value;
  }
  void length(int field, size_t content) {
    *at++ = tag(field, kLength);
    varint(content);
  }
};

// Everything but starts and copies, which come with new sequences only, and the wish for a timing.
void encode_plain(const BatchPlan& plan, const Allocate& allocate) {
  size_t seqs = 0, positions = 0, counts = 0, block_counts = 0, blocks = 0, ends = 0;
  uint64_t not_one = 0;
  bool unsampled = false;
  for (const PlanSlice& slice : plan.slices) {
    seqs += varint_size(slice.seq.value);
    positions += varint_size(slice.start);
    counts += varint_size(slice.count);
    not_one |= slice.count ^ 1;
    unsampled |= !slice.sample;
    block_counts += varint_size(slice.new_blocks.size());
    for (const BlockId block : slice.new_blocks) blocks += varint_size(block);
  }
  for (const SeqId seq : plan.ends) ends += varint_size(seq.value);
  // A column that has nothing to say is left out.
  if (not_one == 0) counts = 0;
  if (blocks == 0) block_counts = 0;
  const size_t samples = unsampled ? plan.slices.size() : 0;
  const size_t slices = field_size(seqs) + field_size(positions) + field_size(counts) + field_size(samples) +
                        field_size(block_counts) + field_size(blocks);
  const size_t step = plan.step.value == 0 ? 0 : 1 + varint_size(plan.step.value);
  const size_t content = step + field_size(ends) + field_size(slices);
  const size_t size = 1 + varint_size(content) + content;

  char* const to = allocate(size);
  Writer out{to};
  out.length(3, content);  // MemberDown.plan
  if (step != 0) {
    *out.at++ = tag(1, kVarint);
    out.varint(plan.step.value);
  }
  if (ends != 0) {
    out.length(4, ends);
    for (const SeqId seq : plan.ends) out.varint(seq.value);
  }
  if (slices != 0) {
    out.length(6, slices);
    out.length(1, seqs);
    for (const PlanSlice& slice : plan.slices) out.varint(slice.seq.value);
    out.length(2, positions);
    for (const PlanSlice& slice : plan.slices) out.varint(slice.start);
    if (counts != 0) {
      out.length(3, counts);
      for (const PlanSlice& slice : plan.slices) out.varint(slice.count);
    }
    if (samples != 0) {
      out.length(4, samples);
      for (const PlanSlice& slice : plan.slices) *out.at++ = slice.sample ? 1 : 0;
    }
    if (blocks != 0) {
      out.length(5, block_counts);
      for (const PlanSlice& slice : plan.slices) out.varint(slice.new_blocks.size());
      out.length(6, blocks);
      for (const PlanSlice& slice : plan.slices) {
        for (const BlockId block : slice.new_blocks) out.varint(block);
      }
    }
  }
  CONCLAVE_CHECK(out.at == to + size);
}

// --- reading; false, or nothing, is "not the plain form", which is protobuf's to read or to refuse

struct Reader {
  const char* at;
  const char* end;

  explicit Reader(std::string_view bytes) : at(bytes.data()), end(bytes.data() + bytes.size()) {}

  bool done() const { return at == end; }
  bool varint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 63 && at != end; shift += 7) {
      const auto byte = static_cast<unsigned char>(*at++);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;  // cut off, or of ten bytes: no value of ours needs them
  }
  bool content(std::string_view& bytes) {
    uint64_t size = 0;
    if (!varint(size) || size > static_cast<uint64_t>(end - at)) return false;
    bytes = {at, static_cast<size_t>(size)};
    at += size;
    return true;
  }
};

// How many varints a column holds, if it holds whole ones.
size_t varints_in(std::string_view column) {
  size_t count = 0;
  for (const char byte : column) count += static_cast<unsigned char>(byte) < 0x80;
  return count;
}

// Gives each number to `take(row, value)`; false where one is not within [least, most] or there are not
// `rows`.
template <class Take>
bool read_column(std::string_view column, size_t rows, uint64_t least, uint64_t most, const Take& take) {
  Reader in(column);
  for (size_t row = 0; row < rows; ++row) {
    uint64_t value = 0;
    if (!in.varint(value) || value < least || value > most) return false;
    take(row, value);
  }
  return in.done();
}

// One field of a message, each at most once: `columns[field]` gets the content of one with a length,
// `numbers[field]` the value of a varint.
template <size_t kFields>
struct Fields {
  std::string_view columns[kFields];
  uint64_t numbers[kFields] = {};
  uint32_t seen = 0;

  // `varints` and `lengths` are the fields known, a bit each.
  bool read(std::string_view bytes, uint32_t varints, uint32_t lengths) {
    Reader in(bytes);
    while (!in.done()) {
      const auto head = static_cast<unsigned char>(*in.at++);
      const unsigned field = head >> 3;
      const uint32_t bit = uint32_t{1} << field;
      if (field >= kFields || (seen & bit) != 0) return false;
      seen |= bit;
      if ((head & 7) == kVarint && (varints & bit) != 0) {
        if (!in.varint(numbers[field])) return false;
      } else if ((head & 7) == kLength && (lengths & bit) != 0) {
        if (!in.content(columns[field])) return false;
      } else {
        return false;
      }
    }
    return true;
  }
};

constexpr uint32_t bits(std::initializer_list<int> fields) {
  uint32_t out = 0;
  for (const int field : fields) out |= uint32_t{1} << field;
  return out;
}

bool read_sampled(std::string_view bytes, std::vector<SampledToken>& to) {
  Fields<6> in;  // 6: top log-probabilities
  if (!in.read(bytes, 0, bits({1, 2, 3, 4, 5}))) return false;
  const auto& [none, seqs, positions, tokens, finishes, logprobs] = in.columns;
  const size_t rows = varints_in(seqs);
  if (rows > kMaxPlanEntries) return false;
  to.resize(rows);
  SampledToken* const out = to.data();
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  if (!read_column(seqs, rows, 1, kAny, [&](size_t row, uint64_t v) { out[row].seq = SeqId(v); }) ||
      !read_column(positions, rows, 0, kMaxPositions,
                   [&](size_t row, uint64_t v) { out[row].position = static_cast<uint32_t>(v); }) ||
      !read_column(tokens, rows, 0, kMaxVocab,
                   [&](size_t row, uint64_t v) { out[row].token = static_cast<TokenId>(v); })) {
    return false;
  }
  if (!finishes.empty() &&
      !read_column(finishes, rows, 0, static_cast<uint64_t>(FinishReason::kError),
                   [&](size_t row, uint64_t v) { out[row].finish = static_cast<FinishReason>(v); })) {
    return false;
  }
  if (logprobs.empty()) return true;
  if (logprobs.size() != rows * sizeof(float)) return false;
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(&out[row].logprob, logprobs.data() + row * sizeof(float), sizeof(float));
    if (!is_logprob(out[row].logprob)) return false;
  }
  return true;
}

bool read_result(std::string_view bytes, StepResult& to) {
  Fields<10> in;  // 3: failures, 6: prompt log-probabilities
  if (!in.read(bytes, bits({1, 4, 5, 8}), bits({7, 9}))) return false;
  for (const int duration : {4, 5, 8}) {
    if (in.numbers[duration] > static_cast<uint64_t>(kMaxDuration)) return false;
  }
  if (in.numbers[1] == 0 || !read_sampled(in.columns[9], to.sampled)) return false;
  to.step = StepId(in.numbers[1]);
  to.compute_ns = static_cast<Nanos>(in.numbers[4]);
  to.expert_wait_ns = static_cast<Nanos>(in.numbers[5]);
  to.plan_wait_ns = static_cast<Nanos>(in.numbers[8]);
  const size_t released = varints_in(in.columns[7]);
  if (released > kMaxPlanEntries) return false;
  to.released.resize(released);
  return read_column(in.columns[7], released, 1, std::numeric_limits<uint64_t>::max(),
                     [&](size_t row, uint64_t v) { to.released[row] = SeqId(v); });
}

// The content of MemberUp.step_result, if the message is that and nothing else.
bool find_result(std::string_view bytes, std::string_view& content) {
  if (bytes.empty() || bytes[0] != tag(3, kLength)) return false;
  Reader in(bytes.substr(1));
  return in.content(content) && in.done();
}

}  // namespace

void encode(const google::protobuf::MessageLite& message, const Allocate& allocate) {
  char* const to = allocate(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(to));
}

void encode(const ToMember& message, const Allocate& allocate) {
  const auto* plan = std::get_if<BatchPlan>(&message);
  if (plan != nullptr && plan->starts.empty() && plan->copies.empty() && !plan->timed) {
    encode_plain(*plan, allocate);
    return;
  }
  pb::MemberDown out;
  to_proto(message, &out);
  encode(out, allocate);
}

StatusOr<FromMember> decode_from_member(std::string_view bytes) {
  std::string_view content;
  if (find_result(bytes, content)) {
    StatusOr<FromMember> result{FromMember(std::in_place_type<StepResult>)};
    if (read_result(content, std::get<StepResult>(*result))) return result;
  }
  pb::MemberUp message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return invalid_argument("not a conclave.v1.MemberUp");
  }
  return from_proto(message);
}

bool TokenBatch::add(const TokenEvent& event) {
  if (event.tokens.size() != 1 || !event.logprobs.empty() || !event.top_logprobs.empty() ||
      !event.error.empty() || !event.prompt_logprobs.empty() || event.cached_tokens) {
    return false;
  }
  CONCLAVE_CHECK(!full());
  rows_.push_back({event.request, event.choice, event.index, event.tokens[0], event.finish});
  return true;
}

void TokenBatch::flush(const Allocate& allocate) {
  size_t choices = 0, indexes = 0, tokens = 0;
  bool chosen = false, finished = false;
  for (const Row& row : rows_) {
    choices += varint_size(row.choice);
    indexes += varint_size(row.index);
    tokens += varint_size(row.token);
    chosen |= row.choice != 0;
    finished |= row.finish != FinishReason::kNone;
  }
  // Columns of nothing but zeros are left out.
  if (!chosen) choices = 0;
  const size_t finishes = finished ? rows_.size() : 0;
  const size_t ids = rows_.size() * sizeof(uint64_t);
  const size_t content = 2 * field_size(ids) + field_size(choices) + field_size(indexes) +
                         field_size(tokens) + field_size(finishes);
  const size_t size = 1 + varint_size(content) + content;

  char* const to = allocate(size);
  Writer out{to};
  out.length(6, content);  // GatewayDown.token_batch
  if (!rows_.empty()) {
    out.length(1, ids);
    for (const Row& row : rows_) out.fixed64(row.request.hi);
    out.length(2, ids);
    for (const Row& row : rows_) out.fixed64(row.request.lo);
    if (chosen) {
      out.length(3, choices);
      for (const Row& row : rows_) out.varint(row.choice);
    }
    out.length(4, indexes);
    for (const Row& row : rows_) out.varint(row.index);
    out.length(5, tokens);
    for (const Row& row : rows_) out.varint(row.token);
    if (finished) {
      out.length(6, finishes);
      for (const Row& row : rows_) *out.at++ = static_cast<char>(row.finish);
    }
  }
  CONCLAVE_CHECK(out.at == to + size);
  rows_.clear();
}

}  // namespace conclave::rpc
