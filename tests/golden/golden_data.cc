#include "tests/golden/golden_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "libs/checkpoint/json.h"
#include "libs/checkpoint/make.h"

namespace conclave::golden {
namespace {

constexpr const char* kData = "tests/golden/data/";

template <class T>
std::vector<T> numbers(const json::value& v) {
  std::vector<T> out;
  for (const json::value& n : v.as_array()) out.push_back(n.to_number<T>());
  return out;
}

std::string text(const json::value& v) { return std::string(json::view(v.as_string())); }

// A float32 matrix in .npy format 1.0, C order.
StatusOr<std::vector<float>> read_npy(const std::string& path, size_t expected) {
  ASSIGN_OR_RETURN(const std::string bytes, json::read_file(path, 64u << 20));
  if (bytes.size() < 10 || bytes.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) != 0) {
    return invalid_argument(path + ": not an .npy file of version 1");
  }
  const size_t header = static_cast<unsigned char>(bytes[8]) + 256u * static_cast<unsigned char>(bytes[9]);
  if (bytes.find("'<f4'") == std::string::npos || bytes.size() != 10 + header + expected * sizeof(float)) {
    return invalid_argument(path + ": not " + std::to_string(expected) + " float32 values");
  }
  std::vector<float> out(expected);
  std::memcpy(out.data(), bytes.data() + 10 + header, expected * sizeof(float));
  return out;
}

StatusOr<Case> read_case(const json::object& o) {
  Case c;
  c.name = text(o.at("name"));
  c.dtype = text(o.at("dtype"));
  c.seed = o.at("seed").to_number<uint64_t>();
  c.fused = o.at("fused").as_bool();
  for (const auto& [key, v] : o.at("set").as_object())
    c.set.emplace_back(std::string(key.data(), key.size()), text(v));
  c.fingerprint = text(o.at("fingerprint"));
  c.vocab = o.at("vocab_size").to_number<size_t>();
  c.ties = o.at("ties").to_number<size_t>();
  c.bias_changed = o.at("bias_changed").to_number<uint64_t>();
  for (const json::value& v : o.at("prompts").as_array()) {
    const json::object& p = v.as_object();
    c.prompts.push_back({numbers<TokenId>(p.at("tokens")), numbers<uint32_t>(p.at("positions")),
                         numbers<uint32_t>(p.at("tied")), p.at("row").to_number<size_t>(),
                         numbers<TokenId>(p.at("continuation"))});
  }
  ASSIGN_OR_RETURN(c.logits, read_npy(kData + c.name + ".npy", o.at("rows").to_number<size_t>() * c.vocab));
  return c;
}

}  // namespace

StatusOr<std::vector<Case>> read_cases() {
  const std::string path = std::string(kData) + "goldens.json";
  ASSIGN_OR_RETURN(const std::string content, json::read_file(path, 64u << 20));
  ASSIGN_OR_RETURN(const json::object document, json::parse_object(content, path));
  std::vector<Case> cases;
  for (const json::value& v : document.at("cases").as_array()) {
    ASSIGN_OR_RETURN(Case c, read_case(v.as_object()));
    cases.push_back(std::move(c));
  }
  return cases;
}

StatusOr<std::unique_ptr<BoundModel>> make_and_load(const Case& c, const std::string& dir) {
  MakeOptions options;
  options.out = dir;
  options.dtype = c.dtype;
  options.seed = c.seed;
  options.fused = c.fused;
  options.set = c.set;
  RETURN_IF_ERROR(make_checkpoint(options).status());
  ASSIGN_OR_RETURN(std::unique_ptr<BoundModel> model, load_model(dir));
  if (model->fingerprint != c.fingerprint) {
    return failed_precondition(
        c.name + ": the made checkpoint is not the one the golden file was made with (fingerprint " +
        model->fingerprint + ", expected " + c.fingerprint + "); run tools/golden/make_goldens.py");
  }
  return model;
}

double relative_error(std::span<const double> a, std::span<const float> b) {
  double error = 0;
  double largest = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    error = std::max(error, std::abs(a[i] - b[i]));
    largest = std::max(largest, static_cast<double>(std::abs(b[i])));
  }
  return std::isfinite(error) ? error / largest : HUGE_VAL;
}

double kl_divergence(std::span<const double> a, std::span<const float> b) {
  auto log_sum = [](auto values) {
    double top = -HUGE_VAL;
    for (const double v : values) top = std::max(top, v);
    double sum = 0;
    for (const double v : values) sum += std::exp(v - top);
    return top + std::log(sum);
  };
  const double za = log_sum(a);
  const double zb = log_sum(b);
  double kl = 0;
  for (size_t i = 0; i < b.size(); ++i) kl += std::exp(b[i] - zb) * ((b[i] - zb) - (a[i] - za));
  return kl;
}

}  // namespace conclave::golden
