// How evenly a checkpoint's experts are used on given texts: reads texts that end with a zero byte from
// standard input, feeds them to a cluster in this process, and prints for every layer how many experts got a
// row and how many times the mean the busiest one got. Exits 1 when an expert of any layer got none, or the
// busiest more than the second argument allows.
//
//   expert_usage MODEL_DIR MOST < texts
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "libs/local_cluster/local_cluster.h"
#include "libs/text/tokenizer.h"

namespace conclave {
namespace {

constexpr size_t kTextsAtOnce = 16;

std::vector<std::string> read_texts() {
  std::vector<std::string> texts(1);
  for (std::istreambuf_iterator<char> c(std::cin), end; c != end; ++c) {
    if (*c == '\0') {
      texts.emplace_back();
    } else {
      texts.back() += *c;
    }
  }
  texts.pop_back();  // every text ends with a zero byte
  return texts;
}

StatusOr<bool> run(const std::string& directory, double most) {
  ASSIGN_OR_RETURN(const auto tokenizer, text::Tokenizer::load(directory + "/tokenizer.json"));
  const std::vector<std::string> texts = read_texts();
  if (texts.empty()) return invalid_field("standard input", "holds no text");
  LocalClusterOptions options;
  options.shards = 1;
  options.threads = std::max(1u, std::thread::hardware_concurrency());
  ASSIGN_OR_RETURN(const auto cluster, LocalCluster::load(directory, std::move(options)));
  RETURN_IF_ERROR(cluster->wait_ready());
  for (size_t begin = 0; begin < texts.size(); begin += kTextsAtOnce) {
    std::vector<std::shared_ptr<PendingCompletion>> pending;
    for (size_t i = begin; i < std::min(texts.size(), begin + kTextsAtOnce); ++i) {
      ASSIGN_OR_RETURN(auto tokens, tokenizer->encode(texts[i], text::SpecialTokens::kParse));
      pending.push_back(cluster->submit(make_request(std::move(tokens), 1)));
    }
    for (const auto& one : pending) RETURN_IF_ERROR(one->wait(300 * kSecond).status());
  }
  const ModelSpec& spec = cluster->spec();
  const std::vector<uint64_t> rows = cluster->shard_metrics(0).tokens;
  bool even = true;
  for (uint32_t layer = 0; layer < spec.num_layers; ++layer) {
    const auto first = rows.begin() + static_cast<std::ptrdiff_t>(size_t{layer} * spec.num_experts);
    uint64_t sum = 0;
    uint64_t busiest = 0;
    uint32_t used = 0;
    for (auto count = first; count != first + spec.num_experts; ++count) {
      sum += *count;
      busiest = std::max(busiest, *count);
      used += *count > 0;
    }
    const double times = static_cast<double>(busiest) * spec.num_experts / static_cast<double>(sum);
    std::printf("layer %u: %u of %u experts used, the busiest %.2f times the mean\n", layer, used,
                spec.num_experts, times);
    even = even && used == spec.num_experts && times <= most;
  }
  return even;
}

}  // namespace
}  // namespace conclave

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: expert_usage MODEL_DIR MOST < texts\n");
    return 2;
  }
  const auto even = conclave::run(argv[1], std::atof(argv[2]));
  if (!even.ok()) {
    std::fprintf(stderr, "expert_usage: %s\n", conclave::message_of(even.status()).c_str());
    return 2;
  }
  return *even ? 0 : 1;
}
