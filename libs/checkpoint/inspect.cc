#include "libs/checkpoint/inspect.h"

#include <cstdio>

#include "libs/checkpoint/binding.h"
#include "libs/checkpoint/json.h"
#include "libs/checkpoint/model_config.h"

namespace conclave {
namespace {

uint64_t elements_of(const TensorInfo& t) {
  const uint32_t size = safetensors_dtype_bytes(t.dtype);
  return size == 0 ? 0 : t.bytes / size;
}

bool is_scale(const std::string& name) { return name.find("_scale") != std::string::npos; }

std::string human(double n, const char* const* units, double step) {
  int u = 0;
  while (n >= step && units[u + 1] != nullptr) {
    n /= step;
    ++u;
  }
  char text[64];
  std::snprintf(text, sizeof text, u == 0 ? "%.0f%s" : "%.2f%s", n, units[u]);
  return text;
}

std::string human_bytes(uint64_t n) {
  static constexpr const char* kUnits[] = {" B", " KiB", " MiB", " GiB", " TiB", nullptr};
  return human(static_cast<double>(n), kUnits, 1024);
}

std::string human_count(uint64_t n) {
  static constexpr const char* kUnits[] = {"", " K", " M", " B", nullptr};
  return human(static_cast<double>(n), kUnits, 1000);
}

uint64_t expert_parameters(const ModelSpec& s) { return 3ull * s.hidden_size * s.intermediate_size; }

}  // namespace

StatusOr<Inspection> inspect_checkpoint(const std::string& dir) {
  Inspection out;
  out.directory = dir;
  ASSIGN_OR_RETURN(out.spec, read_model_spec(dir));
  const ModelSpec& s = out.spec;
  out.kv_bytes_per_token = 2ull * s.num_layers * s.kv_size() * 2;
  FaultList faults;
  ASSIGN_OR_RETURN(const std::unique_ptr<BoundModel> model, load_model(dir, faults));
  out.faults = faults.lines();
  out.fault_count = faults.count();
  std::unique_ptr<TensorDirectory> own;
  if (model == nullptr) {  // broken: count what is there
    FaultList again;
    ASSIGN_OR_RETURN(own, TensorDirectory::open(dir, again));
  } else {
    out.fingerprint = model->fingerprint;
    out.unused = model->unused;
    const ExpertWeights& e = model->experts[0][0];
    for (const WeightView* w : {&e.w1, &e.w2, &e.w3}) {
      out.expert_bytes += w->bytes();
      if (w->scales != nullptr) out.expert_bytes += uint64_t{(w->rows + 127) / 128} * w->scale_cols * 4;
    }
  }
  const TensorDirectory& tensors = model != nullptr ? *model->tensors : *own;
  out.tensors = tensors.tensors().size();
  out.files = tensors.file_count();
  for (const TensorInfo& t : tensors.tensors()) {
    DtypeTotals& d = out.dtypes[t.dtype];
    ++d.tensors;
    d.elements += elements_of(t);
    d.bytes += t.bytes;
    out.bytes += t.bytes;
    if (!is_scale(t.name)) out.parameters += elements_of(t);
  }
  const uint64_t idle = uint64_t{s.num_layers} * (s.num_experts - s.experts_per_token) * expert_parameters(s);
  // The embedding is a look-up of one row, not a product.
  const uint64_t embedding = uint64_t{s.vocab_size} * s.hidden_size;
  if (model != nullptr && out.parameters > idle + embedding)
    out.parameters_per_token = out.parameters - idle - embedding;
  return out;
}

std::string inspection_table(const Inspection& i) {
  std::string out;
  auto row = [&](const std::string& label, const std::string& text) {
    char line[32];
    std::snprintf(line, sizeof line, "%-22s", label.c_str());
    out += line + text + "\n";
  };
  auto n = [](uint64_t v) { return std::to_string(v); };
  const ModelSpec& s = i.spec;
  row("checkpoint", i.directory);
  row("model type", s.model_type);
  row("layers", n(s.num_layers));
  row("hidden size", n(s.hidden_size));
  row("heads", n(s.num_heads) + " query, " + n(s.num_kv_heads) + " key/value, head size " + n(s.head_dim) +
                   ", " + n(s.rotary_dim) + " rotated");
  row("experts", n(s.num_experts) + " a layer, " + n(s.experts_per_token) + " a token, inner size " +
                     n(s.intermediate_size));
  row("vocabulary", n(s.vocab_size));
  row("context", n(s.max_positions) + " tokens");
  row("weights", s.weight_block ? "FP8 E4M3 in blocks of 128 x 128" : "not quantized");
  row("parameters",
      human_count(i.parameters) + (i.parameters_per_token != 0
                                       ? ", " + human_count(i.parameters_per_token) + " used by a token"
                                       : ""));
  row("tensors",
      n(i.tensors) + " in " + n(i.files) + (i.files == 1 ? " file, " : " files, ") + human_bytes(i.bytes));
  for (const auto& [dtype, d] : i.dtypes) {
    row("  " + dtype, n(d.tensors) + " tensors, " + human_bytes(d.bytes));
  }
  if (i.expert_bytes != 0) row("one expert", human_bytes(i.expert_bytes));
  row("KV cache", human_bytes(i.kv_bytes_per_token) + " a token in BF16");
  std::string stops;
  for (const TokenId id : s.stop_token_ids) stops += (stops.empty() ? "" : ", ") + n(id);
  row("stop tokens", stops.empty() ? "none" : stops);
  if (!i.fingerprint.empty()) row("fingerprint", i.fingerprint);
  for (const std::string& note : s.notes) row("note", note);
  if (!i.unused.empty()) row("unused tensors", n(i.unused.size()) + ", first " + i.unused.front());
  row("faults", i.fault_count == 0 ? "none" : n(i.fault_count));
  for (const std::string& f : i.faults) out += "  " + f + "\n";
  if (i.fault_count > i.faults.size()) out += "  ... and " + n(i.fault_count - i.faults.size()) + " more\n";
  return out;
}

std::string inspection_json(const Inspection& i) {
  const ModelSpec& s = i.spec;
  auto strings = [](const std::vector<std::string>& list) {
    json::array a;
    for (const std::string& x : list) a.emplace_back(x);
    return a;
  };
  json::array stops;
  for (const TokenId id : s.stop_token_ids) stops.emplace_back(id);
  json::object dtypes;
  for (const auto& [dtype, d] : i.dtypes) {
    dtypes[dtype] = json::object{{"tensors", d.tensors}, {"elements", d.elements}, {"bytes", d.bytes}};
  }
  const json::object o{
      {"directory", i.directory},
      {"model_type", s.model_type},
      {"num_hidden_layers", s.num_layers},
      {"hidden_size", s.hidden_size},
      {"intermediate_size", s.intermediate_size},
      {"num_attention_heads", s.num_heads},
      {"num_key_value_heads", s.num_kv_heads},
      {"head_dim", s.head_dim},
      {"rotary_dim", s.rotary_dim},
      {"num_local_experts", s.num_experts},
      {"num_experts_per_tok", s.experts_per_token},
      {"vocab_size", s.vocab_size},
      {"max_position_embeddings", s.max_positions},
      {"stop_token_ids", stops},
      {"parameters", i.parameters},
      {"parameters_per_token", i.parameters_per_token},
      {"tensors", i.tensors},
      {"files", i.files},
      {"bytes", i.bytes},
      {"expert_bytes", i.expert_bytes},
      {"kv_bytes_per_token", i.kv_bytes_per_token},
      {"dtypes", dtypes},
      {"fingerprint", i.fingerprint},
      {"notes", strings(s.notes)},
      {"unused", strings(i.unused)},
      {"fault_count", i.fault_count},
      {"faults", strings(i.faults)},
  };
  return boost::json::serialize(o) + "\n";
}

}  // namespace conclave
