#include "libs/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <cerrno>
#include <cstring>
#include <unordered_set>

namespace conclave {
namespace {

using JsonError = boost::json::error_code;
using JsonText = boost::json::string_view;

std::string quoted(std::string_view s) { return "\"" + printable(s) + "\""; }

// One entry of the header while it is read. Missing parts stay negative or unset, so that they can be named.
struct RawEntry {
  TensorInfo info;
  bool has_dtype = false;
  bool has_shape = false;
  std::vector<uint64_t> offsets;
  bool has_offsets = false;
};

// Receives the header's JSON event by event: no tree of a hostile 100 MB header is ever built.
// Grammar: { name: {"dtype": string, "shape": [n...], "data_offsets": [n, n]} ..., "__metadata__": {string:
// string} }
class HeaderHandler {
 public:
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  static constexpr size_t max_key_size = 4096;
  static constexpr size_t max_string_size = static_cast<size_t>(-1);

  HeaderHandler(std::string_view label, FaultList& faults) : label_(label), faults_(faults) {}

  std::vector<RawEntry>& entries() { return entries_; }
  const std::string& stopped() const { return stopped_; }

  bool on_document_begin(JsonError&) { return true; }
  bool on_document_end(JsonError&) { return true; }

  bool on_object_begin(JsonError& ec) {
    if (level_ == 0) {
      level_ = 1;
      return true;
    }
    if (level_ != 1) return stop(ec, "an object where none belongs");
    level_ = 2;
    if (!in_metadata_) entries_.back().info.name = name_;
    return true;
  }

  bool on_object_end(size_t, JsonError&) {
    if (level_ == 2) finish_entry();
    --level_;
    return true;
  }

  bool on_array_begin(JsonError& ec) {
    if (level_ != 2 || in_metadata_ || (field_ != "shape" && field_ != "data_offsets")) {
      return stop(ec, "an array where none belongs");
    }
    level_ = 3;
    RawEntry& e = entries_.back();
    (field_ == "shape" ? e.has_shape : e.has_offsets) = true;
    (field_ == "shape" ? e.info.shape : e.offsets).clear();
    return true;
  }

  bool on_array_end(size_t, JsonError&) {
    level_ = 2;
    return true;
  }

  bool on_key_part(JsonText part, size_t, JsonError&) {
    key_.append(part.data(), part.size());
    return true;
  }

  bool on_key(JsonText part, size_t, JsonError& ec) {
    key_.append(part.data(), part.size());
    if (level_ == 1) {
      name_.swap(key_);
      in_metadata_ = name_ == "__metadata__";
      if (!in_metadata_) {
        if (entries_.size() >= kMaxTensorsPerFile) {
          return stop(ec, "more than " + std::to_string(kMaxTensorsPerFile) + " tensors");
        }
        entries_.emplace_back();
        entries_.back().info.name = name_;
      }
    } else {
      field_.swap(key_);
      if (!in_metadata_ && field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") {
        fault("unknown entry " + quoted(field_));
      }
    }
    key_.clear();
    return true;
  }

  bool on_string_part(JsonText part, size_t, JsonError&) {
    if (!in_metadata_) text_.append(part.data(), part.size());
    return true;
  }

  bool on_string(JsonText part, size_t, JsonError& ec) {
    if (in_metadata_) return level_ == 2 || stop(ec, "\"__metadata__\" must be an object");
    text_.append(part.data(), part.size());
    std::string value;
    value.swap(text_);
    if (level_ != 2) return wrong_value(ec, "a string");
    if (field_ == "dtype") {
      entries_.back().has_dtype = true;
      entries_.back().info.dtype = printable(value);
    } else if (field_ == "shape" || field_ == "data_offsets") {
      fault(field_ + " must be an array of whole numbers");
    }
    return true;
  }

  bool on_number_part(JsonText, JsonError&) { return true; }
  bool on_int64(int64_t n, JsonText, JsonError& ec) {
    if (n < 0) return wrong_value(ec, "a negative number");
    return on_count(static_cast<uint64_t>(n), ec);
  }
  bool on_uint64(uint64_t n, JsonText, JsonError& ec) { return on_count(n, ec); }
  bool on_double(double, JsonText, JsonError& ec) { return wrong_value(ec, "a number that is not whole"); }
  bool on_bool(bool, JsonError& ec) { return wrong_value(ec, "a boolean"); }
  bool on_null(JsonError& ec) { return wrong_value(ec, "null"); }
  bool on_comment_part(JsonText, JsonError&) { return true; }
  bool on_comment(JsonText, JsonError&) { return true; }

 private:
  bool on_count(uint64_t n, JsonError& ec) {
    if (level_ != 3) return wrong_value(ec, "a number");
    RawEntry& e = entries_.back();
    std::vector<uint64_t>& list = field_ == "shape" ? e.info.shape : e.offsets;
    if (list.size() <= kMaxTensorDims)
      list.push_back(n);  // one more than allowed is enough to see that it is too long
    return true;
  }

  // A value that cannot be what the format wants: noted for this tensor, unless the header's very structure
  // is wrong.
  bool wrong_value(JsonError& ec, const std::string& what) {
    if (level_ < 2) return stop(ec, what + " where a tensor's entry belongs");
    if (in_metadata_) {
      faults_.add(label_ + ": __metadata__", "values must be strings, got " + what);
    } else {
      fault(field_ + " must not be or hold " + what);
    }
    return true;
  }

  bool stop(JsonError& ec, const std::string& what) {
    stopped_ = what;
    ec = boost::json::make_error_code(boost::json::error::syntax);
    return false;
  }

  void fault(const std::string& what) {
    faults_.add(label_ + ": " + printable(name_), what);
    if (!entries_.empty()) broken_ = true;
  }

  void finish_entry() {
    if (in_metadata_) {
      in_metadata_ = false;
      return;
    }
    if (broken_) entries_.pop_back();
    broken_ = false;
  }

  std::string label_;
  FaultList& faults_;
  std::vector<RawEntry> entries_;
  std::string stopped_;
  int level_ = 0;
  bool in_metadata_ = false;
  bool broken_ = false;
  std::string key_, name_, field_, text_;
};

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? "," : "") + std::to_string(shape[i]);
  return s + "]";
}

// Checks one entry by itself. True when its byte range can be used.
bool check_entry(const RawEntry& e, uint64_t data_bytes, const std::string& where, FaultList& faults) {
  const size_t before = faults.count();
  if (!e.has_dtype) faults.add(where, "no dtype");
  if (!e.has_shape) faults.add(where, "no shape");
  if (!e.has_offsets) faults.add(where, "no data_offsets");
  if (e.info.shape.size() > kMaxTensorDims) {
    faults.add(where, "more than " + std::to_string(kMaxTensorDims) + " dimensions");
  }
  if (e.has_offsets && e.offsets.size() != 2) faults.add(where, "data_offsets must be two whole numbers");
  if (faults.count() != before) return false;
  const uint64_t begin = e.offsets[0];
  const uint64_t end = e.offsets[1];
  if (begin > end) {
    faults.add(where,
               "data_offsets end before they begin: " + std::to_string(begin) + " > " + std::to_string(end));
    return false;
  }
  if (end > data_bytes) {
    faults.add(where, "data ends at byte " + std::to_string(end) + " of the file's data, which has only " +
                          std::to_string(data_bytes) + ": is the file cut short?");
    return false;
  }
  const uint32_t size = safetensors_dtype_bytes(e.info.dtype);
  if (size == 0) return true;  // an error only where the tensor is needed
  uint64_t expected = size;
  for (const uint64_t n : e.info.shape) {
    if (__builtin_mul_overflow(expected, n, &expected)) {
      faults.add(where, "shape " + shape_text(e.info.shape) + " overflows");
      return false;
    }
  }
  if (expected != end - begin) {
    faults.add(where, e.info.dtype + " " + shape_text(e.info.shape) + " takes " + std::to_string(expected) +
                          " bytes, data_offsets give " + std::to_string(end - begin));
    return false;
  }
  return true;
}

// The tensors must tile the data: what is between or behind them is lost or shared, either of which means
// damage.
void check_tiling(std::vector<const TensorInfo*> sorted, uint64_t data_bytes, bool all_sound,
                  const std::string& label, FaultList& faults) {
  std::sort(sorted.begin(), sorted.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->bytes < b->bytes;
  });
  uint64_t at = 0;
  const TensorInfo* last = nullptr;
  for (const TensorInfo* t : sorted) {
    const std::string where = label + ": " + printable(t->name);
    if (t->begin < at) {
      faults.add(where, "overlaps " +
                            (last != nullptr ? printable(last->name) : std::string("another tensor")) +
                            " by " + std::to_string(std::min(at - t->begin, t->bytes)) + " bytes");
    } else if (t->begin > at && all_sound) {
      faults.add(where, "a hole of " + std::to_string(t->begin - at) + " bytes before it");
    }
    if (t->begin + t->bytes >= at) {
      at = t->begin + t->bytes;
      last = t;
    }
  }
  if (all_sound && at < data_bytes) {
    faults.add(label, std::to_string(data_bytes - at) + " bytes after the last tensor belong to none");
  }
}

}  // namespace

uint32_t safetensors_dtype_bytes(std::string_view dtype) {
  struct Entry {
    std::string_view name;
    uint32_t bytes;
  };
  static constexpr Entry kTable[] = {{"F32", 4},     {"BF16", 2},    {"F8_E4M3", 1}, {"F16", 2}, {"F64", 8},
                                     {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I64", 8},     {"U64", 8}, {"I32", 4},
                                     {"U32", 4},     {"I16", 2},     {"U16", 2},     {"I8", 1},  {"U8", 1},
                                     {"BOOL", 1},    {"C64", 8}};
  for (const Entry& e : kTable) {
    if (e.name == dtype) return e.bytes;
  }
  return 0;
}

std::vector<TensorInfo> parse_safetensors(std::span<const std::byte> file, std::string_view label_view,
                                          FaultList& faults) {
  const std::string label(label_view);
  if (file.size() < 8) {
    faults.add(label, "only " + std::to_string(file.size()) + " bytes, too short for a safetensors file");
    return {};
  }
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i)
    header_bytes = header_bytes << 8 | static_cast<uint64_t>(file[static_cast<size_t>(i)]);
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    faults.add(label, "header length " + std::to_string(header_bytes) + " is above the format's limit of " +
                          std::to_string(kMaxSafetensorsHeaderBytes));
    return {};
  }
  if (header_bytes > file.size() - 8) {
    faults.add(label, "header length " + std::to_string(header_bytes) + " is more than the file has (" +
                          std::to_string(file.size()) + " bytes): is it cut short?");
    return {};
  }
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (header_bytes == 0 || text[0] != '{') {
    faults.add(label, "the header does not begin with '{': not a safetensors file");
    return {};
  }
  boost::json::parse_options options;
  options.max_depth = 4;
  boost::json::basic_parser<HeaderHandler> parser(options, label, faults);
  JsonError error;
  const size_t used = parser.write_some(false, text, static_cast<size_t>(header_bytes), error);
  size_t rest = used;
  while (!error && rest < header_bytes && std::strchr(" \t\r\n", text[rest]) != nullptr && text[rest] != '\0')
    ++rest;
  HeaderHandler& handler = parser.handler();
  if (error || rest < header_bytes) {
    faults.add(label, "header is not valid near byte " + std::to_string(8 + (error ? used : rest)) + ": " +
                          (!handler.stopped().empty() ? handler.stopped()
                           : error                    ? error.message()
                                                      : std::string("text after the object")));
    return {};
  }

  const uint64_t data_begin = 8 + header_bytes;
  const uint64_t data_bytes = file.size() - data_begin;
  const size_t faults_before = faults.count();
  std::vector<TensorInfo> tensors;
  tensors.reserve(handler.entries().size());
  std::unordered_set<std::string_view> names;
  names.reserve(handler.entries().size());
  for (RawEntry& e : handler.entries()) {
    const std::string where = label + ": " + printable(e.info.name);
    if (!names.insert(e.info.name).second) {
      faults.add(where, "named twice");
      continue;
    }
    if (!check_entry(e, data_bytes, where, faults)) continue;
    TensorInfo info = e.info;  // the name stays behind: `names` points at it
    info.begin = data_begin + e.offsets[0];
    info.bytes = e.offsets[1] - e.offsets[0];
    info.data = file.data() + info.begin;
    tensors.push_back(std::move(info));
  }
  std::vector<const TensorInfo*> sorted;
  sorted.reserve(tensors.size());
  for (TensorInfo& t : tensors) {
    t.begin -= data_begin;
    sorted.push_back(&t);
  }
  // Holes mean something only when every entry was read: a broken entry leaves one behind.
  check_tiling(std::move(sorted), data_bytes, faults.count() == faults_before, label, faults);
  for (TensorInfo& t : tensors) t.begin += data_begin;
  return tensors;
}

StatusOr<std::unique_ptr<MappedFile>> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    const std::string message = path + ": " + std::strerror(error);
    return with_field(error == ENOENT ? not_found(message) : invalid_argument(message), path);
  }
  std::unique_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  struct stat st {};
  Status status;
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    status = invalid_field(path, path + ": not a regular file");
  } else if (st.st_size > 0) {
    void* p = ::mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
      status = invalid_field(path, path + ": cannot be mapped: " + std::strerror(errno));
    } else {
      file->data_ = static_cast<const std::byte*>(p);
      file->size_ = static_cast<size_t>(st.st_size);
    }
  }
  ::close(fd);
  RETURN_IF_ERROR(status);
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace conclave
