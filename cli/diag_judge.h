// What `conclave diag` finds on one host and in one process; internal to diag_checks.cc and diag_judge.cc.
// Reports are JSON that some port answered: what has another type than expected is missing.
#pragma once

#include <boost/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/diag_checks.h"

namespace conclave::cli::diag {

const boost::json::value* member(const boost::json::value& value, const char* key);
std::optional<double> number(const boost::json::value& value, const char* key);
std::string text(const boost::json::value& value, const char* key);
boost::json::array list(const boost::json::value& value, const char* key);
boost::json::value object(const boost::json::value& value, const char* key);
boost::json::value parse(const std::string& document);

// "a, b, c".
std::string joined(const std::vector<std::string>& parts, const char* between = ", ");

// By the name of a UCX transport.
bool is_rdma(const std::string& transport);
bool is_shared_memory(const std::string& transport);

// Collects findings; `h` is a host's facts (host_facts.h).
class Judge {
 public:
  std::vector<Finding> findings;

  void add(Severity severity, std::string subject, std::string check, std::string what,
           std::string advice = "");
  void ok(const std::string& subject, const char* check, const std::string& what);
  void warn(const std::string& subject, const char* check, const std::string& what,
            const std::string& advice);
  void problem(const std::string& subject, const char* check, const std::string& what,
               const std::string& advice);

  // --- what is the same for all processes of a host

  void host(const std::string& subject, const boost::json::value& h);

  // --- limits that each process has for itself

  void memlock(const std::string& subject, const boost::json::value& h, bool rdma);
  // Fewer than `wanted` are a warning; `why` so many.
  void open_files(const std::string& subject, const boost::json::value& h, double wanted,
                  const std::string& why);
  void shared_memory(const std::string& subject, const boost::json::value& h, bool used);
  // `threads` of it that compute, where that is known.
  void processors(const std::string& subject, const boost::json::value& h, std::optional<double> threads);
  void kernels_isa(const std::string& subject, const boost::json::value& h, const std::string& isa);

  // What UCX selected, by its own words (ucx_transports).
  void data_plane(const std::string& subject, const std::string& words, const std::string& tls,
                  const std::string& interface, const boost::json::value& h, bool many_hosts);

  // --- clocks

  void clocks(const std::vector<ProcessReport>& processes);

 private:
  void memory(const std::string& subject, const boost::json::value& h);
  void huge_pages(const std::string& subject, const boost::json::value& h);
  void kernel(const std::string& subject, const boost::json::value& h);
  void rdma_ports(const std::string& subject, const boost::json::value& h);
};

}  // namespace conclave::cli::diag
