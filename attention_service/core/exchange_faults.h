// What tests plant in the exchange to prove that their checkers see it, and what they are told. No service
// uses any of it.
#pragma once

#include <cstdint>

#include "libs/base/ids.h"

namespace conclave {

struct ExchangeFaults {
  bool accept_late = false;  // a dispatch is not forgotten with its layer: late replies count
  bool lose_hold = false;    // rows without a home are dropped
  bool count_twice = false;  // an output for a slot that has one counts for another slot
};

// An output row that the exchange took.
struct TakenRow {
  uint64_t round = 0;    // which begin() of this exchange its lane is in, from 1
  uint64_t sent_in = 0;  // the round that asked for it: the same one
  uint32_t token = 0;
  uint32_t slot = 0;
  Incarnation shard;  // that computed it
};

}  // namespace conclave
