// Streamed completions over HTTP, always so many at once, as load.h has them at the scheduler. A stream that
// its router takes with it is resumed.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/cluster/load.h"

namespace conclave {

class RouterLoad {
 public:
  // Request number i is that of completions.h, number i % expected.size(); its text is expected[...].
  RouterLoad(std::string address, std::vector<std::string> expected, uint32_t tokens, uint32_t concurrency);
  // Waits for what is open.
  ~RouterLoad();

  // As those of Load.
  void mark();
  Nanos longest_gap() const;
  bool all_moved(TimePoint since) const;
  size_t running() const;
  LoadReport report() const;
  void stop();
  bool over() const;
  // How often a stream broke and was resumed.
  uint64_t resumed() const;

 private:
  struct Client {
    bool busy = false;
    TimePoint last = 0;  // piece of the stream that is open; 0: none yet
  };

  void serve(Client& client);
  void heard(Client& client, std::string_view bytes);

  const std::string address_;
  const std::vector<std::string> expected_;
  const uint32_t tokens_;
  mutable std::mutex mutex_;
  std::vector<Client> clients_;
  LoadReport report_;
  uint64_t next_ = 0;
  uint64_t resumed_ = 0;
  Nanos longest_gap_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // last
};

}  // namespace conclave
