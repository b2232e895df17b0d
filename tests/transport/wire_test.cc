#include "libs/transport/wire.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <string>

#include "libs/base/random.h"
#include "libs/transport/crc32c.h"
#include "libs/transport/handshake.h"

namespace conclave::wire {
namespace {

using std::byte;

View bytes_of(std::string_view s) { return std::as_bytes(std::span(s)); }

TEST(Crc32c, KnownValues) {
  // RFC 3720, appendix B.4.
  Bytes data(32, byte{0});
  EXPECT_EQ(crc32c(data), 0x8a9136aau);
  for (auto& b : data) b = byte{0xff};
  EXPECT_EQ(crc32c(data), 0x62a8ab43u);
  for (size_t i = 0; i < 32; ++i) data[i] = static_cast<byte>(i);
  EXPECT_EQ(crc32c(data), 0x46dd794eu);
  for (size_t i = 0; i < 32; ++i) data[i] = static_cast<byte>(31 - i);
  EXPECT_EQ(crc32c(data), 0x113fdb5cu);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c({}), 0u);
}

TEST(Crc32c, BothFormsAgreeAtEveryLengthAndCut) {
  SplitMix64 random(1);
  Bytes data(20000);
  for (auto& b : data) b = static_cast<byte>(random.next());
  for (size_t n : {0ul, 1ul, 7ul, 8ul, 9ul, 63ul, 3071ul, 3072ul, 3073ul, 6144ul, 10000ul, 19999ul}) {
    const View v = View(data).subspan(1, n);
    EXPECT_EQ(crc32c(v), crc32c_portable(v)) << n;
    const size_t cut = random.below(n + 1);
    EXPECT_EQ(crc32c(v.subspan(cut), crc32c(v.first(cut))), crc32c(v)) << n << " cut at " << cut;
  }
}

// --- samples: one message of each kind, with fixed contents ---

const Envelope kEnvelope{Incarnation(0x1122334455667788), 0x99aabbccddeeff01, 5, 70000};

DispatchBatch sample_dispatch() {
  DispatchBatch b;
  b.id = {Incarnation(0x1122334455667788), 42};
  b.epoch = Epoch(3);
  b.layer = 17;
  b.hidden = 4;
  b.dtype = RowDtype::kBf16;
  b.time_left = 250'000'000;
  b.expert_begin = {0, 2, 2, 5};
  b.expert_ids = {7, 3, 255, 0, 128};
  b.rows = std::make_shared<std::vector<byte>>(3 * b.row_bytes());
  for (size_t i = 0; i < b.rows->size(); ++i) (*b.rows)[i] = static_cast<byte>(i * 3);
  return b;
}

CombineBatch sample_combine() {
  CombineBatch b;
  b.id = {Incarnation(0x1122334455667788), 42};
  b.shard = Incarnation(0x0102030405060708);
  b.layer = 17;
  b.hidden = 2;
  b.dtype = RowDtype::kF32;
  b.items = {0, 2, 4};
  b.missing = {128};
  b.compute_ns = 1'234'567;
  b.outputs = std::make_shared<std::vector<byte>>(3 * b.row_bytes());
  for (size_t i = 0; i < b.outputs->size(); ++i) (*b.outputs)[i] = static_cast<byte>(255 - i);
  return b;
}

HelloBody sample_hello() {
  HelloBody h;
  h.receiver = Incarnation(0x0102030405060708);
  h.session = 0x1111;
  for (size_t i = 0; i < h.nonce.size(); ++i) h.nonce[i] = static_cast<byte>(i);
  h.window_bytes = 1 << 20;
  h.window_messages = 64;
  h.protocol_min = 1;
  h.protocol_max = 1;
  h.address = "address";
  h.fleet = "k1-cpu|f00d";
  h.proof = hello_proof("secret", kEnvelope.sender, h);
  return h;
}

HelloAckBody sample_hello_ack() {
  HelloAckBody a;
  a.receiver = Incarnation(0x0102030405060708);
  a.session = 0x2222;
  a.window_bytes = 1 << 21;
  a.window_messages = 32;
  a.code = 9;
  a.message = "another fleet";
  a.proof = hello_ack_proof("secret", kEnvelope.sender, a, sample_hello().nonce);
  return a;
}

struct Sample {
  const char* name;
  std::function<Bytes()> make;  // header and rows
};

Bytes with_rows(Bytes header, const RowBuffer& rows) {
  header.insert(header.end(), rows->begin(), rows->end());
  return header;
}

std::vector<Sample> samples() {
  return {
      {"hello",
       [] {
         Bytes b;
         encode(kEnvelope, sample_hello(), b);
         return b;
       }},
      {"hello_ack",
       [] {
         Bytes b;
         encode(kEnvelope, sample_hello_ack(), b);
         return b;
       }},
      {"dispatch",
       [] {
         Bytes b;
         encode(kEnvelope, sample_dispatch(), true, b);
         return with_rows(b, sample_dispatch().rows);
       }},
      {"combine",
       [] {
         Bytes b;
         encode(kEnvelope, sample_combine(), true, b);
         return with_rows(b, sample_combine().outputs);
       }},
      {"cancel",
       [] {
         Bytes b;
         encode_cancel(kEnvelope, {Incarnation(0x1122334455667788), 42}, b);
         return b;
       }},
      {"ack",
       [] {
         Bytes b;
         encode_ack(kEnvelope, b);
         return b;
       }},
      {"ping",
       [] {
         Bytes b;
         encode(kEnvelope, PingBody{9, 8000}, b);
         return b;
       }},
      {"bye",
       [] {
         Bytes b;
         encode_bye(kEnvelope, 0x3333, b);
         return b;
       }},
  };
}

std::string hex(View bytes) {
  std::string out;
  char two[3];
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(bytes[i]));
    out += two;
    out += i % 16 == 15 || i + 1 == bytes.size() ? '\n' : ' ';
  }
  return out;
}

// The bytes of one message of each kind, as version 1 has them. A difference here is a change of the format:
// raise the version, keep reading the old one, and only then write new golden bytes
// (CONCLAVE_WRITE_GOLDEN=1).
TEST(Wire, GoldenBytes) {
  const std::string path = "tests/transport/wire_v1.golden.txt";
  std::string now;
  for (const Sample& s : samples()) now += std::string("# ") + s.name + "\n" + hex(s.make());
  if (std::getenv("CONCLAVE_WRITE_GOLDEN") != nullptr) {
    std::ofstream(path) << now;
    GTEST_SKIP() << "written";
  }
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  const std::string golden((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(now, golden);
}

TEST(Wire, BatchesComeBackEqual) {
  const TransportLimits limits;
  {
    const DispatchBatch in = sample_dispatch();
    ASSERT_TRUE(validate(in, limits).ok());
    Bytes b;
    encode(kEnvelope, in, true, b);
    EXPECT_EQ(b.size() + in.rows->size(), message_bytes(in));
    const auto h = read_header(b, limits);
    ASSERT_TRUE(h.ok()) << h.status();
    EXPECT_EQ(h->envelope.sender, kEnvelope.sender);
    EXPECT_EQ(h->envelope.session, kEnvelope.session);
    EXPECT_EQ(h->envelope.acked_messages, 5u);
    EXPECT_EQ(h->envelope.acked_bytes, 70000u);
    DispatchBatch out;
    ASSERT_TRUE(decode(*h, b, limits, out).ok());
    EXPECT_EQ(out.id, in.id);
    EXPECT_EQ(out.epoch, in.epoch);
    EXPECT_EQ(out.layer, in.layer);
    EXPECT_EQ(out.hidden, in.hidden);
    EXPECT_EQ(out.time_left, in.time_left);
    EXPECT_EQ(out.expert_begin, in.expert_begin);
    EXPECT_EQ(out.expert_ids, in.expert_ids);
    EXPECT_TRUE(check_rows(*h, *in.rows).ok());
    (*in.rows)[5] ^= byte{1};
    EXPECT_EQ(check_rows(*h, *in.rows).code(), StatusCode::kDataLoss);
    EXPECT_FALSE(check_rows(*h, View(*in.rows).first(10)).ok());
  }
  {
    const CombineBatch in = sample_combine();
    ASSERT_TRUE(validate(in, limits).ok());
    Bytes b;
    encode(kEnvelope, in, false, b);
    const auto h = read_header(b, limits);
    ASSERT_TRUE(h.ok()) << h.status();
    CombineBatch out;
    ASSERT_TRUE(decode(*h, b, limits, out).ok());
    EXPECT_EQ(out.id, in.id);
    EXPECT_EQ(out.shard, in.shard);
    EXPECT_EQ(out.items, in.items);
    EXPECT_EQ(out.missing, in.missing);
    EXPECT_EQ(out.compute_ns, in.compute_ns);
    DispatchBatch wrong;
    EXPECT_EQ(field_of(decode(*h, b, limits, wrong)), "kind");
  }
}

TEST(Wire, UnknownSectionsAreSkippedAndBrokenOnesRefused) {
  const TransportLimits limits;
  const std::string text = "something of a later release";
  const std::vector<Section> sections = {{77, 2, bytes_of(text)}, {78, 1, {}}};
  const DispatchBatch in = sample_dispatch();
  Bytes b;
  encode(kEnvelope, in, true, b, sections);
  const auto h = read_header(b, limits);
  ASSERT_TRUE(h.ok()) << h.status();
  DispatchBatch out;
  ASSERT_TRUE(decode(*h, b, limits, out).ok()) << "a reader that knows none of them";
  EXPECT_EQ(out.expert_ids, in.expert_ids);
  const auto found = sections_of(*h, b);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].type, 77);
  EXPECT_EQ(found[0].version, 2);
  EXPECT_TRUE(std::equal(found[0].data.begin(), found[0].data.end(), bytes_of(text).begin()));
  EXPECT_TRUE(found[1].data.empty());
}

// Sets a field of a message and mends the CRC, as an evil or broken peer would.
template <class T>
Status patched(Bytes message, size_t at, T value, const TransportLimits& limits = {}) {
  std::memcpy(message.data() + at, &value, sizeof value);
  uint32_t size;
  std::memcpy(&size, message.data() + 8, 4);
  const uint32_t zero = 0;
  std::memcpy(message.data() + 12, &zero, 4);
  const uint32_t crc = crc32c(View(message).first(std::min<size_t>(size, message.size())));
  std::memcpy(message.data() + 12, &crc, 4);
  const auto h = read_header(message, limits);
  if (!h.ok()) return h.status();
  const View header = View(message).first(h->header_bytes);
  RETURN_IF_ERROR(check_rows(*h, View(message).subspan(h->header_bytes)));
  DispatchBatch d;
  CombineBatch c;
  HelloBody hello;
  switch (h->kind) {
    case Kind::kDispatch:
      return decode(*h, header, limits, d);
    case Kind::kCombine:
      return decode(*h, header, limits, c);
    case Kind::kHello:
      return decode(*h, header, hello);
    default:
      return OkStatus();
  }
}

TEST(Wire, EveryWrongFieldIsNamed) {
  const Bytes d = samples()[2].make(), c = samples()[3].make(), hello = samples()[0].make();
  EXPECT_TRUE(patched(d, 64 + 8, uint64_t{43}).ok()) << "the patching itself is sound";
  EXPECT_EQ(field_of(patched(d, 0, uint32_t{1})), "magic");
  EXPECT_EQ(field_of(patched(d, 4, uint16_t{2})), "version");
  EXPECT_EQ(patched(d, 4, uint16_t{2}).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(field_of(patched(d, 6, uint8_t{0})), "kind");
  EXPECT_EQ(field_of(patched(d, 6, uint8_t{9})), "kind");
  EXPECT_EQ(field_of(patched(d, 7, uint8_t{0x81})), "flags");
  EXPECT_EQ(field_of(patched(d, 8, uint32_t{63})), "header_bytes");
  EXPECT_EQ(field_of(patched(d, 8, uint32_t{0xffffffff})), "header_bytes");
  EXPECT_EQ(field_of(patched(d, 8, uint32_t{72})), "rows_bytes")
      << "what follows is not what the header says";
  EXPECT_EQ(field_of(patched(d, 48, ~uint64_t{0})), "rows_bytes");
  EXPECT_EQ(field_of(patched(d, 48, uint64_t{23})), "rows_bytes");
  EXPECT_EQ(field_of(patched(d, 56, uint32_t{1})), "rows_crc");
  EXPECT_EQ(field_of(patched(d, 60, uint32_t{8})), "sections");
  EXPECT_EQ(field_of(patched(d, 60, uint32_t{0xffffffff})), "sections_bytes");
  // Dispatch: worker 64, seq 72, epoch 80, time_left 88, layer 96, hidden 100, rows 104, items 108, dtype
  // 112, counts 120
  EXPECT_EQ(field_of(patched(d, 64, uint64_t{0})), "id.worker");
  EXPECT_EQ(field_of(patched(d, 88, int64_t{-1})), "time_left");
  EXPECT_EQ(field_of(patched(d, 100, uint32_t{0})), "hidden");
  EXPECT_EQ(field_of(patched(d, 100, uint32_t{0xffffffff})), "hidden");
  EXPECT_EQ(field_of(patched(d, 100, uint32_t{5})), "rows_bytes");
  EXPECT_EQ(field_of(patched(d, 104, uint32_t{0xffffffff})), "rows");
  EXPECT_EQ(field_of(patched(d, 104, uint32_t{2})), "rows_bytes");
  EXPECT_EQ(field_of(patched(d, 108, uint32_t{0xffffffff})), "items");
  EXPECT_EQ(field_of(patched(d, 108, uint32_t{60})), "header_bytes");
  EXPECT_EQ(field_of(patched(d, 112, uint8_t{4})), "dtype");
  EXPECT_EQ(field_of(patched(d, 112, uint8_t{2})), "rows_bytes");
  EXPECT_EQ(field_of(patched(d, 120, uint16_t{3})), "row_items");
  EXPECT_EQ(field_of(patched(d, 120, uint16_t{1})), "row_items");
  EXPECT_EQ(field_of(patched(d, 120, uint16_t{0xffff})), "row_items");
  // Combine: worker 64, seq 72, shard 80, compute 88, layer 96, hidden 100, items 104, missing 108, dtype
  // 112, items 120
  EXPECT_EQ(field_of(patched(c, 104, uint32_t{0xffffffff})), "items");
  EXPECT_EQ(field_of(patched(c, 108, uint32_t{0xffffffff})), "missing");
  EXPECT_EQ(field_of(patched(c, 108, uint32_t{600})), "header_bytes");
  EXPECT_EQ(field_of(patched(c, 120, uint32_t{2})), "items");
  EXPECT_EQ(field_of(patched(c, 128, uint32_t{70000})), "items");
  // Hello: address length 64+48, fleet length 64+50, session 64+8
  EXPECT_EQ(field_of(patched(hello, 64 + 48, uint16_t{0xffff})), "address");
  EXPECT_EQ(field_of(patched(hello, 64 + 50, uint16_t{0xffff})), "fleet");
  EXPECT_EQ(field_of(patched(hello, 64 + 48, uint16_t{400})), "header_bytes");
  EXPECT_EQ(field_of(patched(hello, 64 + 8, uint64_t{0})), "session");
  EXPECT_EQ(field_of(patched(hello, 16, uint64_t{0})), "sender");
  // Bytes after the end.
  Bytes longer = d;
  longer.push_back(byte{0});
  EXPECT_EQ(field_of(patched(longer, 64 + 8, uint64_t{43})), "rows_bytes");
  for (size_t n = 0; n < d.size(); n += 3) {
    const Bytes cut(d.begin(), d.begin() + static_cast<long>(n));
    const auto h = read_header(cut, {});
    EXPECT_TRUE(!h.ok() || !check_rows(*h, View(cut).subspan(h->header_bytes)).ok()) << n;
  }
}

// Any single flipped bit of any message is found.
TEST(Wire, EveryFlippedBitIsFound) {
  const TransportLimits limits;
  for (const Sample& s : samples()) {
    Bytes m = s.make();
    for (size_t bit = 0; bit < m.size() * 8; ++bit) {
      m[bit / 8] ^= static_cast<byte>(1u << (bit % 8));
      const auto h = read_header(m, limits);
      const bool found = !h.ok() || !check_rows(*h, View(m).subspan(h->header_bytes)).ok();
      ASSERT_TRUE(found) << s.name << " bit " << bit;
      m[bit / 8] ^= static_cast<byte>(1u << (bit % 8));
    }
  }
}

TEST(Handshake, ADigestTellsSecretsApartAndIsNoneOfThem) {
  const std::string digest = secret_digest("the secret of this cluster");
  EXPECT_EQ(digest, secret_digest("the secret of this cluster"));
  EXPECT_NE(digest, secret_digest("the secret of that cluster"));
  EXPECT_EQ(digest.size(), 16u);
  EXPECT_EQ(digest.find("secret"), std::string::npos);
}

TEST(Handshake, ProofsDependOnEverythingTheyBind) {
  const HelloBody h = sample_hello();
  const Incarnation sender = kEnvelope.sender;
  EXPECT_TRUE(same_proof(h.proof, hello_proof("secret", sender, h)));
  EXPECT_FALSE(same_proof(h.proof, hello_proof("Secret", sender, h)));
  EXPECT_FALSE(same_proof(h.proof, hello_proof("", sender, h)));
  EXPECT_FALSE(same_proof(h.proof, hello_proof("secret", Incarnation(1), h)));
  const auto changed = [&](auto change) {
    HelloBody other = h;
    change(other);
    return !same_proof(h.proof, hello_proof("secret", sender, other));
  };
  EXPECT_TRUE(changed([](HelloBody& b) { b.receiver = Incarnation(9); }));
  EXPECT_TRUE(changed([](HelloBody& b) { b.session++; }));
  EXPECT_TRUE(changed([](HelloBody& b) { b.nonce[3] ^= byte{1}; }));
  EXPECT_TRUE(changed([](HelloBody& b) { b.address += "x"; }));
  EXPECT_TRUE(changed([](HelloBody& b) { b.fleet = "k1-cpu|f00e"; }));
  EXPECT_TRUE(changed([](HelloBody& b) {
    b.fleet = b.address + b.fleet;
    b.address.clear();
  }));
  HelloAckBody a = sample_hello_ack();
  Nonce other = h.nonce;
  other[0] ^= byte{1};
  EXPECT_FALSE(same_proof(a.proof, hello_ack_proof("secret", sender, a, other))) << "bound to its hello";
  a.code = 0;
  EXPECT_FALSE(same_proof(a.proof, hello_ack_proof("secret", sender, a, h.nonce)));
}

}  // namespace
}  // namespace conclave::wire
