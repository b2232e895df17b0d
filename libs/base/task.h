// Something to be done later: what std::function<void()> is, but it moves only, and closures of up to
// kInline bytes live inside it, so that posting one takes nothing from the heap (std::function does that for
// two trivial words).
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace conclave {

class Task {
 public:
  static constexpr size_t kInline = 48;

  Task() = default;
  Task(std::nullptr_t) {}
  // Not explicit: executors take any closure.
  template <class F>
  requires(!std::is_same_v<std::decay_t<F>, Task> && std::is_invocable_r_v<void, std::decay_t<F>&>)
      Task(F&& f) {
    using Kept = std::decay_t<F>;
    if constexpr (sizeof(Kept) <= kInline && alignof(Kept) <= alignof(std::max_align_t) &&
                  std::is_nothrow_move_constructible_v<Kept>) {
      new (storage_) Kept(std::forward<F>(f));
      static constexpr Kind kind = {[](void* at) { (*static_cast<Kept*>(at))(); },
                                    [](void* from, void* to) {
                                      new (to) Kept(std::move(*static_cast<Kept*>(from)));
                                      static_cast<Kept*>(from)->~Kept();
                                    },
                                    [](void* at) { static_cast<Kept*>(at)->~Kept(); }};
      kind_ = &kind;
    } else {
      *this = Task([kept = std::make_unique<Kept>(std::forward<F>(f))] { (*kept)(); });
    }
  }
  Task(Task&& other) noexcept { take(other); }
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() { reset(); }

  explicit operator bool() const { return kind_ != nullptr; }
  // There must be something to do.
  void operator()() const { kind_->call(storage_); }

 private:
  struct Kind {
    void (*call)(void*);
    void (*move)(void* from, void* to);  // and ends `from`
    void (*end)(void*);
  };
  void take(Task& other) noexcept {
    if (other.kind_ != nullptr) other.kind_->move(other.storage_, storage_);
    kind_ = std::exchange(other.kind_, nullptr);
  }
  // Empty before the closure ends: it may call back.
  void reset() noexcept {
    if (const Kind* kind = std::exchange(kind_, nullptr)) kind->end(storage_);
  }

  const Kind* kind_ = nullptr;
  alignas(std::max_align_t) mutable std::byte storage_[kInline];
};

}  // namespace conclave
