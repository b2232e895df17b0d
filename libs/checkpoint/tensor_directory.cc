#include "libs/checkpoint/tensor_directory.h"

#include <filesystem>
#include <map>
#include <unordered_set>

#include "libs/checkpoint/json.h"

namespace conclave {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// A plain file name of this directory; anything else could lead elsewhere.
bool plain_name(std::string_view file) {
  constexpr std::string_view kEnd = ".safetensors";
  return file.size() > kEnd.size() && file.size() <= 255 && file.substr(file.size() - kEnd.size()) == kEnd &&
         file.find('/') == std::string_view::npos && file.find('\0') == std::string_view::npos &&
         file.front() != '.';
}

}  // namespace

uint64_t TensorDirectory::file_bytes() const {
  uint64_t total = 0;
  for (const auto& f : files_) total += f->bytes().size();
  return total;
}

void TensorDirectory::add_file(const std::string& dir, const std::string& file,
                               const std::vector<std::string_view>* expected, FaultList& faults) {
  auto mapped = MappedFile::open(dir + "/" + file);
  if (!mapped.ok()) {
    faults.add(file, message_of(mapped.status()));
    return;
  }
  const size_t before = faults.count();
  std::vector<TensorInfo> tensors = parse_safetensors((*mapped)->bytes(), file, faults);
  files_.push_back(std::move(*mapped));
  if (expected != nullptr && faults.count() == before) {
    std::unordered_set<std::string_view> have;
    have.reserve(tensors.size());
    for (const TensorInfo& t : tensors) have.insert(t.name);
    for (const std::string_view name : *expected) {
      if (have.erase(name) == 0)
        faults.add(file, "has no " + printable(name) + ", which the index places there");
    }
    for (const std::string_view name : have) {
      faults.add(file, "has " + printable(name) + ", which the index does not place there");
    }
  }
  for (TensorInfo& t : tensors) tensors_.push_back(std::move(t));
}

StatusOr<std::unique_ptr<TensorDirectory>> TensorDirectory::open(const std::string& dir, FaultList& faults) {
  std::unique_ptr<TensorDirectory> out(new TensorDirectory);
  std::error_code error;
  if (std::filesystem::exists(dir + "/" + kSingle, error)) {
    out->add_file(dir, kSingle, nullptr, faults);
  } else {
    auto text = json::read_file(dir + "/" + kIndex, json::kMaxLargeFileBytes);
    if (!text.ok()) {
      if (text.status().code() != StatusCode::kNotFound) return text.status();
      return with_field(not_found(dir + " has neither " + kSingle + " nor " + kIndex), dir);
    }
    ASSIGN_OR_RETURN(const json::object index, json::parse_object(*text, kIndex));
    const json::value* map = json::find(index, "weight_map");
    if (map == nullptr || !map->is_object()) {
      return invalid_field(kIndex,
                           std::string(kIndex) + ": weight_map must be an object of tensor names and files");
    }
    std::map<std::string_view, std::vector<std::string_view>> by_file;
    for (const auto& [name, file] : map->get_object()) {
      const std::string_view tensor(name.data(), name.size());
      if (!file.is_string() || !plain_name(json::view(file.get_string()))) {
        faults.add(std::string(kIndex) + ": " + printable(tensor),
                   "must name a .safetensors file of the same directory, got " +
                       printable(boost::json::serialize(file)));
        continue;
      }
      by_file[json::view(file.get_string())].push_back(tensor);
    }
    if (by_file.size() > kMaxShardFiles) {
      return invalid_field(kIndex, std::string(kIndex) + ": names " + std::to_string(by_file.size()) +
                                       " files, more than the limit of " + std::to_string(kMaxShardFiles));
    }
    for (const auto& [file, names] : by_file) out->add_file(dir, std::string(file), &names, faults);
  }
  out->by_name_.reserve(out->tensors_.size());
  for (size_t i = 0; i < out->tensors_.size(); ++i) {
    if (!out->by_name_.emplace(out->tensors_[i].name, i).second) {
      faults.add(out->tensors_[i].name, "is in more than one file");
    }
  }
  return out;
}

}  // namespace conclave
