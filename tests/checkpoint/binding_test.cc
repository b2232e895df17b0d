#include "libs/checkpoint/binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>

#include "libs/base/float_bits.h"
#include "libs/checkpoint/inspect.h"
#include "libs/checkpoint/make.h"
#include "tests/checkpoint/test_files.h"

namespace conclave {
namespace {

using testing::add_tensor;
using testing::edit;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::read_text;
using testing::TempDir;
using testing::write_text;

MakeOptions small(const std::string& out, const std::string& dtype = "f32") {
  MakeOptions o;
  o.out = out;
  o.dtype = dtype;
  o.layers = 2;
  o.set = {{"num_local_experts", "6"}, {"num_experts_per_tok", "2"}, {"vocab_size", "320"}};
  return o;
}

void make(const MakeOptions& o) {
  const auto made = make_checkpoint(o);
  ASSERT_TRUE(made.ok()) << message_of(made.status());
}

std::string load_error(const std::string& dir) {
  const auto model = load_model(dir);
  return model.ok() ? std::string("loaded") : message_of(model.status());
}

float element(const WeightView& w, uint32_t row, uint32_t col) {
  const size_t i = size_t{row} * w.cols + col;
  switch (w.dtype) {
    case WeightDtype::kF32:
      return static_cast<const float*>(w.data)[i];
    case WeightDtype::kBf16:
      return bf16_to_float(static_cast<const Bf16*>(w.data)[i]);
    case WeightDtype::kFp8E4m3:
      return e4m3_to_float(static_cast<const uint8_t*>(w.data)[i]) *
             w.scales[size_t{row / 128} * w.scale_cols + col / 128];
  }
  return 0;
}

void expect_equal(const WeightView& a, const WeightView& b) {
  ASSERT_EQ(a.rows, b.rows);
  ASSERT_EQ(a.cols, b.cols);
  for (uint32_t r = 0; r < a.rows; ++r) {
    for (uint32_t c = 0; c < a.cols; ++c) ASSERT_EQ(element(a, r, c), element(b, r, c)) << r << "," << c;
  }
}

TEST(Binding, FillsEveryParameter) {
  TempDir dir;
  make(small(dir / "m"));
  const auto model = load_model(dir / "m");
  ASSERT_TRUE(model.ok()) << message_of(model.status());
  const BoundModel& m = **model;
  EXPECT_EQ(m.spec.name, "m");
  EXPECT_EQ(m.tensor_count, 3u + 2 * (10 + 6 * 3));
  ASSERT_EQ(m.dense.layers.size(), 2u);
  ASSERT_EQ(m.experts.size(), 2u);
  ASSERT_EQ(m.experts[1].size(), 6u);
  const DenseLayerWeights& l = m.dense.layers[1];
  EXPECT_EQ(l.q_proj.rows, 256u);
  EXPECT_EQ(l.q_proj.cols, 128u);
  EXPECT_EQ(l.o_proj.rows, 128u);
  EXPECT_EQ(l.q_norm.size(), 256u);
  EXPECT_EQ(l.k_norm.size(), 64u);
  EXPECT_EQ(l.gate_bias.size(), 6u);
  EXPECT_EQ(m.experts[1][5].w2.rows, 128u);
  EXPECT_EQ(m.experts[1][5].w2.cols, 64u);
  EXPECT_NE(l.gate_bias[0], 0.0f);
  EXPECT_EQ(m.fingerprint.size(), 32u);
}

// Both name styles, with the same seed, hold the same weights: F32 with any inner size, FP8 with whole
// blocks.
TEST(Binding, FusedAndPerExpertNamesGiveTheSameWeights) {
  for (const std::string dtype : {"f32", "fp8"}) {
    TempDir dir;
    MakeOptions a = small(dir / "a", dtype);
    if (dtype == "fp8") a.set.emplace_back("intermediate_size", "256");
    MakeOptions b = a;
    b.out = dir / "b";
    b.fused = true;
    make(a);
    make(b);
    const auto ma = load_model(a.out);
    const auto mb = load_model(b.out);
    ASSERT_TRUE(ma.ok() && mb.ok()) << message_of(mb.status());
    EXPECT_LT((*mb)->tensor_count, (*ma)->tensor_count);
    for (uint32_t l = 0; l < 2; ++l) {
      expect_equal((*ma)->dense.layers[l].gate, (*mb)->dense.layers[l].gate);
      EXPECT_EQ((*ma)->dense.layers[l].gate_bias, (*mb)->dense.layers[l].gate_bias);
      for (uint32_t e = 0; e < 6; ++e) {
        expect_equal((*ma)->experts[l][e].w1, (*mb)->experts[l][e].w1);
        expect_equal((*ma)->experts[l][e].w2, (*mb)->experts[l][e].w2);
        expect_equal((*ma)->experts[l][e].w3, (*mb)->experts[l][e].w3);
      }
    }
  }
}

TEST(Binding, SparseCheckpointOfTrueGeometryBindsInTime) {
  TempDir dir;
  MakeOptions o;
  o.out = dir / "sparse";
  o.geometry = "m2";
  o.dtype = "fp8";
  o.sparse = true;
  make(o);
  const std::clock_t start = std::clock();  // processor time, so that other load does not count
  const auto model = load_model(o.out);
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  ASSERT_TRUE(model.ok()) << message_of(model.status());
  EXPECT_EQ((*model)->tensor_count, 96'103u);
  EXPECT_EQ((*model)->tensor_bytes, 230'121'630'720u);  // the size of the published checkpoint
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(seconds, 10.0);
#endif
  RecordProperty("bind_seconds", std::to_string(seconds));
  std::printf("bound 96,103 tensors in %.2f s\n", seconds);
}

// One file of F32 tensors whose header can be edited in place.
std::string single(const TempDir& dir, const std::string& dtype = "f32") {
  MakeOptions o = small(dir / "m", dtype);
  o.single_file = true;
  make(o);
  return o.out + "/model.safetensors";
}

TEST(Binding, ListsAllFaultsAtOnce) {
  TempDir dir;
  const std::string file = single(dir);
  edit(file, "\"model.norm.weight\"", "\"model.norm.weighs\"");  // one missing, one unknown
  edit(file, "layers.1.self_attn.k_proj.weight\":{\"dtype\":\"F32\",\"shape\":[64,128]",  // transposed
       "layers.1.self_attn.k_proj.weight\":{\"dtype\":\"F32\",\"shape\":[128,64]");
  edit(file,
       "layers.1.block_sparse_moe.e_score_correction_bias\":{\"dtype\":\"F32\"",  // a dtype of no use here
       "layers.1.block_sparse_moe.e_score_correction_bias\":{\"dtype\":\"I32\"");
  const std::string error = load_error(dir / "m");
  EXPECT_THAT(error, HasSubstr("4 faults"));
  EXPECT_THAT(error, HasSubstr("model.norm.weight: missing"));
  EXPECT_THAT(error, HasSubstr("model.norm.weighs: the model has no such parameter"));
  EXPECT_THAT(
      error,
      HasSubstr("model.layers.1.self_attn.k_proj.weight: shape [128,64], but config.json makes it [64,128]"));
  EXPECT_THAT(error, HasSubstr("e_score_correction_bias: dtype I32, expected F32 or BF16"));
  const auto inspection = inspect_checkpoint(dir / "m");
  ASSERT_TRUE(inspection.ok());
  EXPECT_EQ(inspection->fault_count, 4u);
  EXPECT_THAT(inspection_table(*inspection), HasSubstr("model.norm.weight: missing"));
  EXPECT_THAT(inspection_json(*inspection), HasSubstr("\"fault_count\":4"));
}

TEST(Binding, ConfigOfAnotherSizeIsNotThisCheckpoint) {
  TempDir dir;
  single(dir);
  edit(dir / "m/config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
  edit(dir / "m/config.json", "\"attn_type_list\": [1,1]", "\"attn_type_list\": [1]");
  // Layer 1 lies where multi-token prediction may be: the config says up to 3 such layers, so it counts as
  // unused.
  EXPECT_EQ(load_error(dir / "m"), "loaded");
  edit(dir / "m/config.json", "\"num_mtp_modules\": 3", "\"num_mtp_modules\": 0");
  edit(dir / "m/config.json", "\"use_mtp\": true", "\"use_mtp\": false");
  EXPECT_THAT(load_error(dir / "m"),
              HasSubstr("model.layers.1.input_layernorm.weight: the model has no such parameter"));
}

TEST(Binding, ExtraTensorsAreKnownOrRefused) {
  TempDir dir;
  const std::string file = single(dir);
  const auto plain = load_model(dir / "m");
  ASSERT_TRUE(plain.ok());
  add_tensor(file, "model.layers.0.self_attn.rotary_emb.inv_freq", 8);
  add_tensor(file, "model.layers.2.mtp.weight", 8);
  add_tensor(file, "model.layers.4.anything", 8);
  add_tensor(file, "model.mtp_transition.weight", 8);
  const auto model = load_model(dir / "m");
  ASSERT_TRUE(model.ok()) << message_of(model.status());
  EXPECT_THAT((*model)->unused,
              ::testing::UnorderedElementsAre("model.layers.0.self_attn.rotary_emb.inv_freq",
                                              "model.layers.2.mtp.weight", "model.layers.4.anything",
                                              "model.mtp_transition.weight"));
  add_tensor(file, "model.layers.5.anything", 8);
  add_tensor(file, "model.layers.1.self_attn.q_proj.bias", 8);
  const std::string error = load_error(dir / "m");
  EXPECT_THAT(error, HasSubstr("2 faults"));
  EXPECT_THAT(error, HasSubstr("model.layers.5.anything: the model has no such parameter"));
  EXPECT_THAT(error, HasSubstr("model.layers.1.self_attn.q_proj.bias: the model has no such parameter"));
}

TEST(Binding, TiedEmbeddingsNeedNoHead) {
  TempDir dir;
  MakeOptions o = small(dir / "m");
  o.set.emplace_back("tie_word_embeddings", "true");
  make(o);
  const auto model = load_model(o.out);
  ASSERT_TRUE(model.ok()) << message_of(model.status());
  EXPECT_EQ((*model)->dense.lm_head.data, (*model)->dense.embed.data);
}

TEST(Binding, FusedScalesUnderEitherSpelling) {
  TempDir dir;
  MakeOptions o = small(dir / "m", "fp8");
  o.fused = true;
  o.single_file = true;
  o.set.emplace_back("intermediate_size", "128");
  make(o);
  const auto before = load_model(o.out);
  ASSERT_TRUE(before.ok());
  testing::edit_header(o.out + "/model.safetensors", "_proj_scale_inv", "_proj_scales_inv");
  const auto after = load_model(o.out);
  ASSERT_TRUE(after.ok()) << message_of(after.status());
  expect_equal((*before)->experts[1][4].w3, (*after)->experts[1][4].w3);
  expect_equal((*before)->experts[1][4].w2, (*after)->experts[1][4].w2);
  testing::edit_header(o.out + "/model.safetensors", "gate_up_proj_scales_inv", "gate_up_proj_scalez_inv");
  EXPECT_THAT(load_error(o.out), HasSubstr("gate_up_proj_scale_inv: missing"));
}

// As transformers writes a BF16 model: the gate and its bias are BF16 too.
TEST(Binding, Bf16GateAndBias) {
  TempDir dir;
  MakeOptions o = small(dir / "m", "bf16");
  o.fused = true;
  make(o);
  const auto model = load_model(o.out);
  ASSERT_TRUE(model.ok()) << message_of(model.status());
  EXPECT_EQ((*model)->dense.layers[0].gate.dtype, WeightDtype::kBf16);
  EXPECT_NE((*model)->dense.layers[0].gate_bias[2], 0.0f);
}

TEST(Binding, ListOfFaultsIsBounded) {
  TempDir dir;
  MakeOptions o;
  o.out = dir / "m";
  make(o);
  edit(o.out + "/config.json", "\"hidden_size\": 128", "\"hidden_size\": 256");
  const std::string error = load_error(o.out);
  EXPECT_THAT(error, HasSubstr("more"));
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 101);
}

TEST(Binding, Fp8ScalesAreChecked) {
  TempDir dir;
  const std::string file = single(dir, "fp8");
  edit(file, "layers.0.self_attn.q_proj.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[2,1]",
       "layers.0.self_attn.q_proj.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[1,2]");
  edit(file, "layers.0.self_attn.o_proj.weight_scale_inv", "layers.0.self_attn.o_proj.weight_scale_in_");
  const std::string error = load_error(dir / "m");
  EXPECT_THAT(error, HasSubstr("3 faults"));
  EXPECT_THAT(error, HasSubstr("q_proj.weight_scale_inv: shape [1,2], but config.json makes it [2,1]"));
  EXPECT_THAT(error, HasSubstr("o_proj.weight_scale_inv: missing"));
  EXPECT_THAT(error, HasSubstr("o_proj.weight_scale_in_: the model has no such parameter"));
}

TEST(Binding, Fp8WithoutQuantizationConfigIsRefused) {
  TempDir dir;
  single(dir, "fp8");
  const std::string text = read_text(dir / "m/config.json");
  const size_t at = text.find(",\n  \"quantization_config\"");
  ASSERT_NE(at, std::string::npos);
  write_text(dir / "m/config.json", text.substr(0, at) + "\n}\n");
  EXPECT_THAT(load_error(dir / "m"), HasSubstr("config.json has no quantization_config"));
}

// A checkpoint whose tensors begin at odd addresses (an unpadded header, as some writers leave it) still
// loads.
TEST(Binding, UnalignedDataIsCopied) {
  TempDir dir;
  const std::string file = single(dir);
  const auto before = load_model(dir / "m");
  ASSERT_TRUE(before.ok());
  std::string bytes = read_text(file);
  uint64_t n = 0;
  std::memcpy(&n, bytes.data(), 8);
  const std::string json = bytes.substr(8, n) + " ";
  const std::string odd = dir / "m/odd";
  write_text(odd, testing::safetensors_bytes(json, bytes.substr(8 + n)));
  std::filesystem::rename(odd, file);
  const auto after = load_model(dir / "m");
  ASSERT_TRUE(after.ok()) << message_of(after.status());
  EXPECT_FALSE((*after)->copies.empty());
  EXPECT_EQ((*before)->fingerprint, (*after)->fingerprint);
  expect_equal((*before)->experts[0][3].w2, (*after)->experts[0][3].w2);
}

TEST(Binding, FingerprintIgnoresFilesAndSeesWeights) {
  TempDir dir;
  MakeOptions a = small(dir / "a");
  MakeOptions b = small(dir / "b");
  b.single_file = true;
  MakeOptions c = small(dir / "c");
  c.seed = 2;
  for (const MakeOptions& o : {a, b, c}) make(o);
  const auto ma = load_model(a.out), mb = load_model(b.out), mc = load_model(c.out);
  ASSERT_TRUE(ma.ok() && mb.ok() && mc.ok());
  EXPECT_GT((*ma)->file_count, 0u);
  EXPECT_EQ((*ma)->fingerprint, (*mb)->fingerprint);
  EXPECT_NE((*ma)->fingerprint, (*mc)->fingerprint);
}

TEST(Binding, NotFiniteNormIsRefused) {
  TempDir dir;
  const std::string file = single(dir);
  const auto model = load_model(dir / "m");
  ASSERT_TRUE(model.ok());
  const int64_t i = (*model)->tensors->find("model.layers.1.input_layernorm.weight");
  ASSERT_GE(i, 0);
  const uint64_t at = (*model)->tensors->tensors()[static_cast<size_t>(i)].begin + 4 * 7;
  std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
  f.seekp(static_cast<std::streamoff>(at));
  const uint32_t nan = 0x7fc00000;
  f.write(reinterpret_cast<const char*>(&nan), 4);
  f.close();
  EXPECT_THAT(load_error(dir / "m"), HasSubstr("input_layernorm.weight: element 7 is not a finite number"));
}

// --- files ---

std::string sharded(const TempDir& dir) {
  MakeOptions o = small(dir / "m");
  o.file_bytes = 256 << 10;
  make(o);
  return o.out;
}

TEST(Files, MissingOrdinalsAreToleratedMissingFilesAreNot) {
  TempDir dir;
  const std::string m = sharded(dir);
  const auto model = load_model(m);
  ASSERT_TRUE(model.ok());
  const size_t files = (*model)->file_count;
  ASSERT_GE(files, 4u);
  char first[64];
  std::snprintf(first, sizeof first, "model-%05d-of-%05zu.safetensors", 2, files);
  char renamed[64];
  std::snprintf(renamed, sizeof renamed, "model-%05d-of-%05zu.safetensors", 77, files);
  std::filesystem::rename(m + "/" + first, m + "/" + renamed);
  const std::string error = load_error(m);
  EXPECT_THAT(error, HasSubstr(std::string(first) + ": "));
  EXPECT_THAT(error, HasSubstr("No such file"));
  EXPECT_THAT(error, HasSubstr("missing"));  // and every parameter that was in it
  std::string index = read_text(m + "/model.safetensors.index.json");
  for (size_t at; (at = index.find(first)) != std::string::npos;)
    index.replace(at, std::strlen(first), renamed);
  write_text(m + "/model.safetensors.index.json", index);
  EXPECT_EQ(load_error(m), "loaded");
}

TEST(Files, IndexAndFilesMustAgree) {
  TempDir dir;
  const std::string m = sharded(dir);
  const std::string index = m + "/model.safetensors.index.json";
  edit(index, "\"model.layers.0.input_layernorm.weight\"", "\"model.layers.0.input_layernorm.weighs\"");
  const std::string error = load_error(m);
  EXPECT_THAT(error, HasSubstr("has no model.layers.0.input_layernorm.weighs, which the index places there"));
  EXPECT_THAT(error,
              HasSubstr("has model.layers.0.input_layernorm.weight, which the index does not place there"));
}

TEST(Files, IndexCannotLeaveTheDirectory) {
  TempDir dir;
  const std::string m = sharded(dir);
  const std::string index = m + "/model.safetensors.index.json";
  edit(index, "\"model-00000", "\"../m/model-00000");
  EXPECT_THAT(load_error(m), HasSubstr("must name a .safetensors file of the same directory"));
}

TEST(Files, NothingThereIsSaid) {
  TempDir dir;
  EXPECT_THAT(load_error(dir / "none"), HasSubstr("no such directory"));
  EXPECT_THAT(load_error(dir.path()), HasSubstr("no config.json"));
  const std::string m = sharded(dir);
  std::filesystem::remove(m + "/model.safetensors.index.json");
  EXPECT_THAT(load_error(m), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  write_text(m + "/model.safetensors.index.json", "{\"weight_map\": [1]}");
  EXPECT_THAT(load_error(m), HasSubstr("weight_map must be an object"));
  write_text(m + "/model.safetensors.index.json", "{\"weight_map\": {");
  EXPECT_THAT(load_error(m), HasSubstr("not valid JSON"));
}

TEST(Files, TruncatedShardListsWhatIsLost) {
  TempDir dir;
  const std::string m = sharded(dir);
  const auto model = load_model(m);
  ASSERT_TRUE(model.ok());
  char name[64];
  std::snprintf(name, sizeof name, "/model-%05d-of-%05zu.safetensors", 1, (*model)->file_count);
  std::filesystem::resize_file(m + name, std::filesystem::file_size(m + name) / 2);
  const std::string error = load_error(m);
  EXPECT_THAT(error, HasSubstr("is the file cut short?"));
  EXPECT_THAT(error, HasSubstr("faults"));
  EXPECT_THAT(error, Not(HasSubstr("a hole")));
}

// The broken copy: at the true size, several kinds of damage, each listed.
TEST(Files, BrokenCopyOfTrueGeometryListsItsFaults) {
  TempDir dir;
  MakeOptions o;
  o.out = dir / "sparse";
  o.geometry = "m2";
  o.dtype = "fp8";
  o.sparse = true;
  make(o);
  const std::string first = o.out + "/model-00000-of-00054.safetensors";
  ASSERT_TRUE(std::filesystem::exists(first));
  std::filesystem::resize_file(o.out + "/model-00011-of-00054.safetensors", 1u << 30);
  std::filesystem::resize_file(o.out + "/model-00012-of-00054.safetensors", 4);
  std::filesystem::remove(o.out + "/model-00013-of-00054.safetensors");
  std::fstream f(o.out + "/model-00014-of-00054.safetensors",
                 std::ios::in | std::ios::out | std::ios::binary);
  const uint64_t huge = 1ull << 40;
  f.write(reinterpret_cast<const char*>(&huge), 8);
  f.close();
  const std::string error = load_error(o.out);
  EXPECT_THAT(error, HasSubstr("model-00011-of-00054.safetensors"));
  EXPECT_THAT(error, HasSubstr("is the file cut short?"));
  EXPECT_THAT(error, HasSubstr("more"));
}

}  // namespace
}  // namespace conclave
