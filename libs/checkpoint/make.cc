#include "libs/checkpoint/make.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>

#include "libs/base/clock.h"
#include "libs/checkpoint/make_internal.h"
#include "libs/checkpoint/safetensors.h"

namespace conclave {
namespace {

namespace fs = std::filesystem;
using make::TensorPlan;

constexpr size_t kChunkBytes = 4u << 20;
constexpr uint64_t kMinFileBytes = 1u << 20;
constexpr uint64_t kMaxFileBytes = 4ull << 30;
// Tensors one checkpoint may have: five times what MiniMax-M2 has. The plan of each takes some hundred bytes.
constexpr uint64_t kMaxTensors = 500'000;
constexpr Nanos kProgressEvery = 250 * kMillisecond;

Status file_error(const std::string& path) { return invalid_field(path, path + ": " + std::strerror(errno)); }

class OutputFile {
 public:
  explicit OutputFile(std::string path) : path_(std::move(path)) {}
  ~OutputFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  Status open() {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    return fd_ < 0 ? file_error(path_) : OkStatus();
  }
  Status write(const void* data, size_t n) {
    const char* p = static_cast<const char*>(data);
    while (n > 0) {
      const ssize_t k = ::write(fd_, p, n);
      if (k < 0 && errno == EINTR) continue;
      if (k < 0) return file_error(path_);
      p += k;
      n -= static_cast<size_t>(k);
    }
    return OkStatus();
  }
  Status extend(uint64_t size) {
    return ::ftruncate(fd_, static_cast<off_t>(size)) == 0 ? OkStatus() : file_error(path_);
  }
  // Reports what a delayed write has found.
  Status close() {
    const int fd = fd_;
    fd_ = -1;
    return ::close(fd) == 0 ? OkStatus() : file_error(path_);
  }

 private:
  std::string path_;
  int fd_ = -1;
};

struct FilePlan {
  std::string name;
  std::vector<size_t> tensors;  // indices, in the order their bytes lie in the file
};

std::vector<FilePlan> plan_files(const std::vector<TensorPlan>& tensors, const MakeOptions& options) {
  const uint64_t total = std::accumulate(tensors.begin(), tensors.end(), uint64_t{0},
                                         [](uint64_t sum, const TensorPlan& t) { return sum + t.bytes; });
  const uint64_t limit = options.single_file ? UINT64_MAX
                         : options.file_bytes != 0
                             ? options.file_bytes
                             : std::clamp((total + 7) / 8, kMinFileBytes, kMaxFileBytes);
  std::vector<FilePlan> files;
  uint64_t used = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (files.empty() || (used + tensors[i].bytes > limit && used > 0)) {
      files.emplace_back();
      used = 0;
    }
    files.back().tensors.push_back(i);
    used += tensors[i].bytes;
  }
  for (size_t f = 0; f < files.size(); ++f) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", f, files.size());
    files[f].name = options.single_file ? "model.safetensors" : name;
    // Wider elements first: then everything is aligned, whatever the sizes.
    std::stable_sort(files[f].tensors.begin(), files[f].tensors.end(), [&](size_t a, size_t b) {
      return safetensors_dtype_bytes(tensors[a].dtype) > safetensors_dtype_bytes(tensors[b].dtype);
    });
  }
  return files;
}

// Length and JSON, padded so that the data begins at a multiple of 8.
std::string file_header(const std::vector<TensorPlan>& tensors, const FilePlan& file) {
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  uint64_t at = 0;
  for (const size_t i : file.tensors) {
    const TensorPlan& t = tensors[i];
    json += ",\"" + t.name + "\":{\"dtype\":\"" + t.dtype + "\",\"shape\":[";
    for (size_t d = 0; d < t.shape.size(); ++d) json += (d ? "," : "") + std::to_string(t.shape[d]);
    json += "],\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(at + t.bytes) + "]}";
    at += t.bytes;
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string out(8, '\0');
  const uint64_t n = json.size();
  for (int i = 0; i < 8; ++i) out[static_cast<size_t>(i)] = static_cast<char>(n >> (8 * i) & 0xff);
  return out + json;
}

class Maker {
 public:
  Maker(const MakeOptions& options, std::vector<TensorPlan> tensors)
      : options_(options), tensors_(std::move(tensors)), files_(plan_files(tensors_, options)) {
    for (const TensorPlan& t : tensors_) total_ += t.bytes;
  }

  MakeReport report() const { return {tensors_.size(), files_.size(), total_}; }
  const std::vector<std::string>& written() const { return written_; }

  Status check_room() const {
    if (options_.sparse) return OkStatus();
    std::error_code error;
    const fs::space_info space = fs::space(options_.out, error);
    if (!error && space.available < total_ + (64u << 20)) {
      return with_field(
          resource_exhausted("the checkpoint takes " + std::to_string(total_ >> 20) + " MiB, " +
                             options_.out + " has room for " + std::to_string(space.available >> 20)),
          "out");
    }
    return OkStatus();
  }

  Status write_weights() {
    buffer_.resize(kChunkBytes);
    for (const FilePlan& file : files_) RETURN_IF_ERROR(write_file(file));
    if (options_.progress) options_.progress(total_, total_);
    if (options_.single_file) return OkStatus();
    std::string index = "{\"metadata\":{\"total_size\":" + std::to_string(total_) + "},\"weight_map\":{";
    const char* comma = "";
    for (const FilePlan& file : files_) {
      for (const size_t i : file.tensors) {
        index += comma;
        index += "\n\"" + tensors_[i].name + "\":\"" + file.name + "\"";
        comma = ",";
      }
    }
    return write_text("model.safetensors.index.json", index + "\n}}\n");
  }

  Status write_text(const std::string& name, const std::string& text) {
    OutputFile out(options_.out + "/" + name);
    RETURN_IF_ERROR(out.open());
    written_.push_back(name);
    RETURN_IF_ERROR(out.write(text.data(), text.size()));
    return out.close();
  }

 private:
  Status write_file(const FilePlan& file) {
    OutputFile out(options_.out + "/" + file.name);
    RETURN_IF_ERROR(out.open());
    written_.push_back(file.name);
    const std::string header = file_header(tensors_, file);
    RETURN_IF_ERROR(out.write(header.data(), header.size()));
    if (options_.sparse) {
      uint64_t size = header.size();
      for (const size_t i : file.tensors) size += tensors_[i].bytes;
      RETURN_IF_ERROR(out.extend(size));
      return out.close();
    }
    // Small tensors share a buffer's write.
    size_t pending = 0;
    auto flush = [&]() -> Status {
      RETURN_IF_ERROR(out.write(buffer_.data(), pending));
      done_ += pending;
      pending = 0;
      if (options_.progress && steady_now() >= next_progress_) {
        options_.progress(done_, total_);
        next_progress_ = steady_now() + kProgressEvery;
      }
      return OkStatus();
    };
    for (const size_t i : file.tensors) {
      const TensorPlan& t = tensors_[i];
      const size_t parts = std::max<size_t>(t.parts.size(), 1);
      for (size_t p = 0; p < parts; ++p) {
        const uint64_t key = make::tensor_key(options_.seed, t.parts.empty() ? t.name : t.parts[p]);
        for (uint64_t offset = 0; offset < t.part_bytes;) {
          // Draws are counted in groups of 8 bytes, so a part is cut only at multiples of 8.
          size_t n = static_cast<size_t>(std::min<uint64_t>(t.part_bytes - offset, buffer_.size() - pending));
          if (n < t.part_bytes - offset) n = n / 8 * 8;
          if (n == 0) {
            RETURN_IF_ERROR(flush());
            continue;
          }
          make::fill_bytes(t, key, offset, {buffer_.data() + pending, n});
          pending += n;
          offset += n;
        }
      }
    }
    RETURN_IF_ERROR(flush());
    return out.close();
  }

  const MakeOptions& options_;
  std::vector<TensorPlan> tensors_;
  std::vector<FilePlan> files_;
  std::vector<std::byte> buffer_;
  std::vector<std::string> written_;
  uint64_t total_ = 0;
  uint64_t done_ = 0;
  TimePoint next_progress_ = 0;
};

Status write_all(Maker& maker, const make::MadeConfig& config) {
  RETURN_IF_ERROR(maker.write_weights());
  const make::MadeTokenizer tokenizer =
      make::make_tokenizer(config.spec.vocab_size, config.spec.max_positions);
  RETURN_IF_ERROR(maker.write_text("tokenizer.json", tokenizer.tokenizer_json));
  RETURN_IF_ERROR(maker.write_text("tokenizer_config.json", tokenizer.tokenizer_config_json));
  RETURN_IF_ERROR(maker.write_text("generation_config.json", tokenizer.generation_config_json));
  RETURN_IF_ERROR(maker.write_text("chat_template.jinja", make::kChatTemplate));
  return maker.write_text("config.json", config.config_json);
}

}  // namespace

StatusOr<MakeReport> make_checkpoint(const MakeOptions& options) {
  if (options.out.empty()) return invalid_field("out", "the directory to write to is not given");
  ASSIGN_OR_RETURN(const make::MadeConfig config, make::make_config(options));
  const uint64_t experts = uint64_t{config.spec.num_layers} * config.spec.num_experts;
  if (experts * (options.dtype == "fp8" ? 6 : 3) > kMaxTensors) {
    return invalid_field("num_local_experts", std::to_string(experts) +
                                                  " experts make more than the limit of " +
                                                  std::to_string(kMaxTensors) + " tensors");
  }
  std::error_code error;
  const bool existed = fs::exists(options.out, error);
  if (existed && (!fs::is_directory(options.out, error) || !fs::is_empty(options.out, error))) {
    return invalid_field("out", options.out + " exists and is not an empty directory");
  }
  fs::create_directories(options.out, error);
  if (error) return invalid_field("out", options.out + ": " + error.message());
  Maker maker(options, make::plan_tensors(config.spec, options));
  Status status = maker.check_room();
  if (status.ok()) status = write_all(maker, config);
  if (!status.ok()) {
    for (const std::string& name : maker.written()) fs::remove(options.out + "/" + name, error);
    if (!existed) fs::remove(options.out, error);  // only if empty, as we found it
    return status;
  }
  return maker.report();
}

}  // namespace conclave
