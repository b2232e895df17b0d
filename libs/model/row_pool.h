// Row memory that is used again: a RowBuffer from here comes back to the pool when its last holder (a message
// in flight, a receiver over loopback) lets go of it, on whatever thread that is. Keeps big allocations out
// of the token path. Bound: at most `max_kept` buffers wait in the pool; more are freed.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "libs/model/dispatch.h"

namespace conclave {

class RowPool {
 public:
  explicit RowPool(size_t max_kept = 32) : shelf_(std::make_shared<Shelf>(max_kept)) {}

  // A buffer of exactly `bytes`, contents unspecified. Any thread; may outlive the pool.
  RowBuffer get(size_t bytes) {
    auto bytes_vector = shelf_->take(bytes);
    bytes_vector->resize(bytes);
    return RowBuffer(
        bytes_vector.release(),
        [shelf = shelf_](std::vector<std::byte>* v) {
          shelf->put(std::unique_ptr<std::vector<std::byte>>(v));
        },
        CountAllocator<std::byte>{shelf_});
  }

 private:
  class Shelf {
   public:
    explicit Shelf(size_t max_kept) : max_kept_(max_kept) {}
    // The smallest that is large enough, else the largest: buffers of one size serve that size again, and the
    // pool's memory settles.
    std::unique_ptr<std::vector<std::byte>> take(size_t bytes) {
      std::lock_guard lock(mutex_);
      if (kept_.empty()) return std::make_unique<std::vector<std::byte>>();
      size_t best = 0;
      for (size_t i = 1; i < kept_.size(); ++i) {
        const size_t have = kept_[best]->capacity();
        const size_t candidate = kept_[i]->capacity();
        if (have < bytes ? candidate > have : candidate >= bytes && candidate < have) best = i;
      }
      std::swap(kept_[best], kept_.back());
      auto v = std::move(kept_.back());
      kept_.pop_back();
      return v;
    }
    void put(std::unique_ptr<std::vector<std::byte>> v) {
      std::lock_guard lock(mutex_);
      if (kept_.size() < max_kept_) kept_.push_back(std::move(v));
    }
    // Memory of a count; all of one size.
    void* take_count(size_t bytes) {
      std::lock_guard lock(mutex_);
      if (counts_.empty()) return ::operator new(bytes);
      void* count = counts_.back();
      counts_.pop_back();
      return count;
    }
    void put_count(void* count) {
      {
        std::lock_guard lock(mutex_);
        if (counts_.size() < max_kept_) {
          counts_.push_back(count);
          return;
        }
      }
      ::operator delete(count);
    }
    ~Shelf() {
      for (void* count : counts_) ::operator delete(count);
    }

   private:
    const size_t max_kept_;
    std::mutex mutex_;
    std::vector<void*> counts_;
    std::vector<std::unique_ptr<std::vector<std::byte>>> kept_;
  };

  // Of the counts of holders, one beside each buffer.
  template <class T>
  struct CountAllocator {
    using value_type = T;
    explicit CountAllocator(std::shared_ptr<Shelf> of) : shelf(std::move(of)) {}
    template <class U>
    CountAllocator(const CountAllocator<U>& other) : shelf(other.shelf) {}
    T* allocate(size_t n) { return static_cast<T*>(shelf->take_count(n * sizeof(T))); }
    void deallocate(T* count, size_t) { shelf->put_count(count); }
    template <class U>
    bool operator==(const CountAllocator<U>& other) const {
      return shelf == other.shelf;
    }
    std::shared_ptr<Shelf> shelf;
  };

  std::shared_ptr<Shelf> shelf_;
};

}  // namespace conclave
