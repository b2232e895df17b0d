// Faults that tests plant to prove that their checkers see them. No service sets any.
#pragma once

namespace conclave::scheduler {

struct PlantedFaults {
  bool leak_block = false;          // one block of every retired sequence stays in use
  bool free_before_retire = false;  // blocks return when a sequence ends, not when that has been reported
  bool short_chunk = false;         // a prefill chunk after the first starts one position late
  bool forget_lost_worker = false;  // sequences of a lost worker are not replayed
  bool replay_prompt_only = false;  // replay forgets the tokens generated so far
  bool share_any_salt = false;      // pages are shared across salts and tenants
  bool share_by_tokens = false;     // a shareable page is known by its own tokens, not by its prefix
  bool copy_nothing = false;        // a page to be copied on write is not
  bool starve_tenant = false;       // one tenant is charged a hundred times what it got
  bool end_twice = false;           // a cancelled request gets its last event twice
};

}  // namespace conclave::scheduler
