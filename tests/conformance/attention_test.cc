#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

struct Sequence {
  KvShape shape;
  uint32_t length = 0;
  std::vector<float> q, k, v;
  std::vector<std::vector<std::byte>> pages;
  std::vector<const std::byte*> table;

  Sequence(uint64_t seed, uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t n, Precision precision,
           float scale)
      : length(n) {
    shape = {heads, kv_heads, dim, precision};
    Draw draw(seed);
    q = draw.normals(size_t{n} * heads * dim, scale);
    k = draw.normals(size_t{n} * kv_heads * dim);
    v = draw.normals(size_t{n} * kv_heads * dim);
    for (uint32_t p = 0; p < n; ++p) {
      // What a page holds beyond its positions is nobody's: NaN patterns.
      if (p % 16 == 0) pages.emplace_back(kv_page_bytes(shape), std::byte{0xff});
      kv_store(shape, pages.back().data(), p % 16, &k[size_t{p} * kv_heads * dim],
               &v[size_t{p} * kv_heads * dim]);
    }
    for (const auto& page : pages) table.push_back(page.data());
  }
  size_t row() const { return size_t{shape.num_heads} * shape.head_dim; }

  std::vector<float> run(const Context& ctx, uint32_t from, uint32_t chunk) const {
    std::vector<float> out(size_t{length - from} * row(), -5.0f);
    for (uint32_t start = from; start < length; start += chunk) {
      const AttentionSlice slice{&q[start * row()], &out[(start - from) * row()], start,
                                 std::min(chunk, length - start), table.data()};
      paged_attention(ctx, shape, {&slice, 1});
    }
    return out;
  }
};

void check(uint64_t seed, uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t n, uint32_t from,
           std::vector<uint32_t> chunks, float scale = 1.0f) {
  for (const Precision precision : {Precision::kBf16, Precision::kF32}) {
    const Sequence s(seed, heads, kv_heads, dim, n, precision, scale);
    const std::string shape = std::to_string(heads) + "/" + std::to_string(kv_heads) + "x" +
                              std::to_string(dim) + " n=" + std::to_string(n);
    const std::vector<float> contract = s.run({}, from, n);
    const bool bf16 = precision == Precision::kBf16;
    const ref::Vector keys = bf16 ? as_double(rounded(s.k)) : as_double(s.k);
    const ref::Vector values = bf16 ? as_double(rounded(s.v)) : as_double(s.v);
    for (uint32_t p = from; p < n; p += p + 1 == n ? 1 : std::min(n - 1 - p, (n - from) / 7 + 1)) {
      const ref::Vector q(s.q.begin() + p * s.row(), s.q.begin() + (p + 1) * s.row());
      const ref::Vector want = ref::attention(q, keys, values, heads, kv_heads, dim, p);
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_NEAR(contract[(p - from) * s.row() + i], want[i], 2e-5 * scale) << shape << " position " << p;
    }
    for (const Way& way : all_ways())
      for (const uint32_t chunk : chunks)
        expect_same_bits(contract, s.run(way.ctx, from, chunk),
                         way.name + " " + shape + " chunk " + std::to_string(chunk));
  }
}

TEST(Attention, Shapes) {
  check(1, 6, 1, 16, 70, 0, {1, 7, 64, 70});
  check(2, 4, 4, 8, 40, 0, {1, 7, 40});
  if (!kSmallShapes) check(3, 8, 2, 24, 150, 0, {1, 7, 64, 150});
  check(4, 3, 1, 20, 33, 0, {1, 5, 33});
  check(5, 1, 1, 64, 100, 0, {1, 64, 100});
  if (!kSmallShapes) check(6, 14, 2, 40, 65, 0, {1, 7, 64, 65});
  check(7, 80, 1, 8, 20, 0, {1, 7, 20});
}

TEST(Attention, RealHeads) { check(8, 48, 8, 128, kSmallShapes ? 20 : 80, 0, {1, 64, 80}); }

TEST(Attention, ManySegments) {
  const uint32_t n = kSmallShapes ? 600 : 1700;
  check(9, 4, 2, 16, n, n - (kSmallShapes ? 20 : 70), {1, 7, 64, 70});
  check(10, 6, 1, 32, n, n - 3, {1, 3});
}

TEST(Attention, LargeScores) { check(11, 4, 2, 16, 600, kSmallShapes ? 570 : 500, {1, 7, 100}, 30.0f); }

TEST(Attention, SeveralSequencesAtOnce) {
  const Sequence a(20, 6, 2, 16, 600, Precision::kBf16, 1), b(21, 6, 2, 16, 37, Precision::kBf16, 1),
      c(22, 6, 2, 16, 1, Precision::kBf16, 1);
  for (const Way& way : all_ways()) {
    std::vector<float> oa(a.row()), ob(37 * b.row()), oc(c.row());
    const AttentionSlice slices[] = {{&a.q[599 * a.row()], oa.data(), 599, 1, a.table.data()},
                                     {b.q.data(), ob.data(), 0, 37, b.table.data()},
                                     {c.q.data(), oc.data(), 0, 1, c.table.data()}};
    paged_attention(way.ctx, a.shape, slices);
    expect_same_bits(a.run({}, 599, 1), oa, way.name);
    expect_same_bits(b.run({}, 0, 37), ob, way.name);
    expect_same_bits(c.run({}, 0, 1), oc, way.name);
  }
}

}  // namespace
}  // namespace conclave::kernels::testing
