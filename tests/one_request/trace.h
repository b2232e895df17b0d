// Writes down what passes each border of the cluster, in words. Decorators of the real ports: nothing here
// changes what happens.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "libs/ports/expert_transport.h"
#include "libs/ports/member_link.h"
#include "libs/ports/scheduler_port.h"

namespace conclave::one_request {

// One line of the page's table.
struct TraceLine {
  std::string hop;    // number of the hop in the design
  std::string where;  // "attention-0 -> expert-1"
  std::string what;
};

class Trace {
 public:
  void name(Incarnation incarnation, std::string name) { names_[incarnation] = std::move(name); }
  const std::string& name_of(Incarnation incarnation) const;
  // Lines are kept only while on, so that start-up stays off the page.
  void set_on(bool on) { on_ = on; }
  void add(std::string hop, std::string where, std::string what);
  const std::vector<TraceLine>& lines() const { return lines_; }

 private:
  std::map<Incarnation, std::string> names_;
  std::vector<TraceLine> lines_;
  bool on_ = false;
};

// Hops 7 to 9: dispatches and combines as the worker's transport sees them.
std::unique_ptr<ExpertTransport> trace_transport(std::unique_ptr<ExpertTransport> inner, Trace& trace);

// Hop 3: plans as they reach the member; the rest passes unseen.
std::unique_ptr<MemberHandler> trace_handler(MemberHandler& inner, std::string member, Trace& trace);

// Hop 9's end: step results as the worker reports them.
std::unique_ptr<MemberLink> trace_link(MemberLink& inner, std::string member, Trace& trace);

// "ids 1 2 3", cut after a dozen.
std::string ids_text(const std::vector<TokenId>& ids);

}  // namespace conclave::one_request
