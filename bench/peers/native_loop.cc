// The peer's side of the comparison: llama.cpp's library driven by a loop of our own, with one thread pool
// for the life of the process (bindings of other languages make one a step, or lose time between steps).
//
//   bench_peers_native_loop GGUF THREADS
//
// Commands on standard input; each is answered by one line of JSON. FILE holds a line of tokens for each
// stream, as bench_peers_ours writes it: the loop computes the same tokens, and says how often its own greedy
// choice is the next of them.
//   decode STREAMS PROMPT STEPS FILE   tokens a second of the steps after the prompts
//   prefill TOKENS FILE                logits of every position
//   experts STREAMS PROMPT STEPS FILE  how many experts of a layer a step touches, on the mean; nothing is
//   timed
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Tokens = std::vector<std::vector<llama_token>>;

// Rows of one computation; the library's own default.
constexpr uint32_t kBatchRows = 512;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "bench_peers_native_loop: %s\n", why.c_str());
  std::exit(1);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Tokens read_tokens(const std::string& path, size_t streams, size_t length) {
  std::ifstream in(path);
  Tokens all;
  for (std::string line; all.size() < streams && std::getline(in, line);) {
    std::istringstream words(line);
    std::vector<llama_token> one;
    for (llama_token token; one.size() < length && words >> token;) one.push_back(token);
    if (one.size() < length) fail(path + ": a stream is too short");
    all.push_back(std::move(one));
  }
  if (all.size() < streams) fail(path + ": too few streams");
  return all;
}

// Which experts the steps touched: sums of distinct ones over the layers computed.
struct ExpertCount {
  bool on = false;
  size_t distinct = 0;
  size_t layers = 0;
};

bool watch_routing(ggml_tensor* t, bool ask, void* user) {
  auto& count = *static_cast<ExpertCount*>(user);
  if (std::strncmp(ggml_get_name(t), "ffn_moe_topk", 12) != 0) return !ask;
  if (ask) return count.on;
  std::set<int32_t> seen;
  std::vector<int32_t> row(static_cast<size_t>(t->ne[0]));
  for (int64_t r = 0; r < t->ne[1]; ++r) {
    ggml_backend_tensor_get(t, row.data(), static_cast<size_t>(r) * t->nb[1], row.size() * sizeof(int32_t));
    seen.insert(row.begin(), row.end());
  }
  count.distinct += seen.size();
  ++count.layers;
  return true;
}

class Loop {
 public:
  Loop(const char* path, int threads) : threads_(threads) {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
          if (level >= GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.load_mode = LLAMA_LOAD_MODE_MMAP_MLOCK;
    model_ = llama_model_load_from_file(path, params);
    if (model_ == nullptr) fail(std::string("cannot load ") + path);
    vocab_size_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
    pool_ = ggml_threadpool_new(&pool);
    if (pool_ == nullptr) fail("no thread pool");
    ggml_threadpool_pause(pool_);
  }
  ~Loop() {
    llama_model_free(model_);
    ggml_threadpool_free(pool_);
    llama_backend_free();
  }

  void decode(size_t streams, size_t prompt, size_t steps, const Tokens& all) {
    const auto context = begin(streams, prompt + steps, nullptr);
    prompts(context.get(), prompt, all);
    size_t agreed = 0;
    constexpr size_t kLead = 2;
    double start = 0;
    for (size_t s = 0; s < steps; ++s) {
      if (s == kLead) start = seconds();
      agreed += step(context.get(), prompt + s, all);
    }
    const double time = seconds() - start;
    end();
    const size_t timed = (steps - kLead) * streams;
    // The last step's choice has nothing to be compared with.
    std::printf("{\"tokens_per_s\": %.4f, \"window_s\": %.3f, \"agreement\": %.4f}\n",
                static_cast<double>(timed) / time, time,
                static_cast<double>(agreed) / static_cast<double>((steps - 1) * streams));
  }

  void experts(size_t streams, size_t prompt, size_t steps, const Tokens& all) {
    ExpertCount count;
    const auto context = begin(streams, prompt + steps, &count);
    prompts(context.get(), prompt, all);
    count.on = true;
    for (size_t s = 0; s < steps; ++s) step(context.get(), prompt + s, all);
    end();
    std::printf("{\"experts\": %.3f}\n",
                static_cast<double>(count.distinct) / static_cast<double>(std::max<size_t>(count.layers, 1)));
  }

  void prefill(size_t length, const Tokens& all) {
    const auto context = begin(1, length, nullptr);
    llama_batch batch = llama_batch_init(kBatchRows, 0, 1);
    const double start = seconds();
    for (size_t at = 0; at < length; at += kBatchRows) {
      batch.n_tokens = 0;
      for (size_t i = at; i < std::min<size_t>(length, at + kBatchRows); ++i)
        add(batch, all[0][i], i, 0, true);
      compute(context.get(), batch);
    }
    const double time = seconds() - start;
    const llama_token next = greedy(llama_get_logits_ith(context.get(), batch.n_tokens - 1));
    llama_batch_free(batch);
    end();
    std::printf("{\"tokens_per_s\": %.4f, \"window_s\": %.3f, \"agreement\": %d}\n",
                static_cast<double>(length) / time, time, next == all[0][length] ? 1 : 0);
  }

 private:
  struct FreeContext {
    void operator()(llama_context* c) const { llama_free(c); }
  };
  using Context = std::unique_ptr<llama_context, FreeContext>;

  // A context for `streams` sequences of `length`, warm: a step has been computed and forgotten.
  Context begin(size_t streams, size_t length, ExpertCount* count) {
    llama_context_params params = llama_context_default_params();
    const size_t stream_length = (length + 255) / 256 * 256;
    params.n_ctx = static_cast<uint32_t>(stream_length * streams);
    params.n_seq_max = static_cast<uint32_t>(streams);
    params.n_batch = params.n_ubatch = kBatchRows;
    params.n_threads = params.n_threads_batch = threads_;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.no_perf = true;
    if (count != nullptr) {
      params.cb_eval = watch_routing;
      params.cb_eval_user_data = count;
    }
    Context context(llama_init_from_model(model_, params));
    if (context == nullptr) fail("cannot make a context");
    llama_attach_threadpool(context.get(), pool_, pool_);
    ggml_threadpool_resume(pool_);
    return context;
  }
  void end() { ggml_threadpool_pause(pool_); }

  static void add(llama_batch& batch, llama_token token, size_t position, size_t stream, bool logits) {
    const int32_t i = batch.n_tokens++;
    batch.token[i] = token;
    batch.pos[i] = static_cast<llama_pos>(position);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = static_cast<llama_seq_id>(stream);
    batch.logits[i] = logits ? 1 : 0;
  }
  static void compute(llama_context* context, const llama_batch& batch) {
    if (llama_decode(context, batch) != 0) fail("llama_decode failed");
    llama_synchronize(context);
  }
  static void prompts(llama_context* context, size_t prompt, const Tokens& all) {
    llama_batch batch = llama_batch_init(static_cast<int32_t>(kBatchRows), 0, 1);
    for (size_t s = 0; s < all.size(); ++s) {
      for (size_t i = 0; i < prompt; ++i) {
        add(batch, all[s][i], i, s, i + 1 == prompt);
        if (batch.n_tokens == static_cast<int32_t>(kBatchRows) || (s + 1 == all.size() && i + 1 == prompt)) {
          compute(context, batch);
          batch.n_tokens = 0;
        }
      }
    }
    llama_batch_free(batch);
  }
  // One token of every stream; returns how many of the choices are the next token.
  size_t step(llama_context* context, size_t position, const Tokens& all) {
    llama_batch batch = llama_batch_init(static_cast<int32_t>(all.size()), 0, 1);
    for (size_t s = 0; s < all.size(); ++s) add(batch, all[s][position], position, s, true);
    compute(context, batch);
    size_t agreed = 0;
    for (size_t s = 0; s < all.size(); ++s) {
      const llama_token next = greedy(llama_get_logits_ith(context, static_cast<int32_t>(s)));
      if (position + 1 < all[s].size() && all[s][position + 1] == next) ++agreed;
    }
    llama_batch_free(batch);
    return agreed;
  }
  llama_token greedy(const float* logits) const {
    return static_cast<llama_token>(std::max_element(logits, logits + vocab_size_) - logits);
  }

  const int threads_;
  llama_model* model_ = nullptr;
  ggml_threadpool* pool_ = nullptr;
  int32_t vocab_size_ = 0;
};

int run(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: bench_peers_native_loop GGUF THREADS\n");
    return 2;
  }
  Loop loop(argv[1], std::max(1, std::atoi(argv[2])));
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string command, path;
    size_t streams = 1, prompt = 0, steps = 0;
    in >> command;
    if (command == "decode" && in >> streams >> prompt >> steps >> path && streams > 0 && steps > 2) {
      loop.decode(streams, prompt, steps, read_tokens(path, streams, prompt + steps));
    } else if (command == "experts" && in >> streams >> prompt >> steps >> path && streams > 0) {
      loop.experts(streams, prompt, steps, read_tokens(path, streams, prompt + steps));
    } else if (command == "prefill" && in >> prompt >> path && prompt > 0) {
      loop.prefill(prompt, read_tokens(path, 1, prompt + 1));
    } else {
      fail("cannot do: " + line);
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
