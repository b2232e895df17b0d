// Strong identifiers. Each is a plain number that the compiler will not mix with another kind.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace conclave {

template <class Tag, class T>
struct StrongId {
  T value{};
  constexpr StrongId() = default;
  constexpr explicit StrongId(T v) : value(v) {}
  constexpr auto operator<=>(const StrongId&) const = default;
  constexpr explicit operator bool() const { return value != T{}; }
};

// One membership of one process: start time in ms since 1970 (upper 42 bits) and 22 random bits. Never
// reused; an incarnation declared dead is fenced for ever. 0 means "none".
using Incarnation = StrongId<struct IncarnationTag, uint64_t>;
// Numbers the placements that one scheduler incarnation published, from 1.
using Epoch = StrongId<struct EpochTag, uint64_t>;
// Numbers the plans sent to one worker by one scheduler incarnation, from 1, without gaps.
using StepId = StrongId<struct StepIdTag, uint64_t>;
// One sequence (one choice of one request) of one scheduler incarnation.
using SeqId = StrongId<struct SeqIdTag, uint64_t>;
// A page of one worker's KV cache, 0 .. num_blocks-1.
using BlockId = uint32_t;
using TokenId = uint32_t;

// A request, drawn at random by the gateway that accepted it; the key of idempotent resubmission.
struct RequestId {
  uint64_t hi = 0;
  uint64_t lo = 0;
  constexpr auto operator<=>(const RequestId&) const = default;
};

// What a dispatch is known by, on the wire and at the worker: never reused within a worker incarnation.
struct DispatchId {
  Incarnation worker;
  uint64_t seq = 0;
  constexpr auto operator<=>(const DispatchId&) const = default;
};

namespace internal {
inline size_t mix64(uint64_t x) {  // splitmix64 finaliser
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return static_cast<size_t>(x ^ (x >> 31));
}
}  // namespace internal
}  // namespace conclave

template <class Tag, class T>
struct std::hash<conclave::StrongId<Tag, T>> {
  size_t operator()(const conclave::StrongId<Tag, T>& id) const noexcept {
    return conclave::internal::mix64(static_cast<uint64_t>(id.value));
  }
};
template <>
struct std::hash<conclave::RequestId> {
  size_t operator()(const conclave::RequestId& id) const noexcept {
    return conclave::internal::mix64(id.hi ^ (id.lo * 0x9e3779b97f4a7c15ull));
  }
};
template <>
struct std::hash<conclave::DispatchId> {
  size_t operator()(const conclave::DispatchId& id) const noexcept {
    return conclave::internal::mix64(id.worker.value ^ (id.seq * 0x9e3779b97f4a7c15ull));
  }
};
