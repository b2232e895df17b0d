// Conformance: who is refused, what is told of it, and how the cluster's secret is changed.
#include <mutex>
#include <string>
#include <vector>

#include "tests/transport/conformance_tests.h"

namespace conclave::testing {
namespace {

using E = TransportEvent;

// What a transport tells of those it refuses; filled on its executor, read by the test.
struct Refusals {
  std::function<void(HelloRefusal, Incarnation, const Status&)> listener() {
    return [this](HelloRefusal reason, Incarnation peer, const Status& why) {
      std::lock_guard lock(mutex);
      lines.push_back(std::string(hello_refusal_name(reason)) + " " + std::to_string(peer.value) + " " +
                      message_of(why));
    };
  }
  size_t count() const {
    std::lock_guard lock(mutex);
    return lines.size();
  }
  std::string last() const {
    std::lock_guard lock(mutex);
    return lines.empty() ? "" : lines.back();
  }
  mutable std::mutex mutex;
  std::vector<std::string> lines;
};

}  // namespace

TEST_P(TransportConformance, EachRefusalIsToldWithItsReason) {
  Refusals told;
  TransportOptions choosy = rig->options();
  choosy.max_peers = 1;
  choosy.on_refused = told.listener();
  auto b = rig->make(choosy);
  const auto refused = [&](const TransportOptions& options, const std::string& reason) {
    const size_t before = told.count();
    auto a = rig->make(options);
    a->connect(*b);
    ASSERT_TRUE(rig->wait(*b, [&] { return told.count() > before; })) << reason;
    ASSERT_TRUE(rig->saw<E::PeerDown>(*a)) << reason;
    EXPECT_EQ(told.count(), before + 1);
    EXPECT_TRUE(told.last().starts_with(reason + " " + std::to_string(a->id.value) + " ")) << told.last();
    EXPECT_LT(told.last().size(), 2000u);  // whatever the stranger claims
  };
  TransportOptions other = rig->options();
  other.secret = "a guess";
  other.connect_deadline = 200 * kMillisecond;
  refused(other, "secret");
  other = rig->options();
  other.secret.clear();  // a process that was given none
  other.connect_deadline = 200 * kMillisecond;
  refused(other, "secret");
  other = rig->options();
  other.fleet = std::string(wire::kMaxFleetBytes, 'f');
  refused(other, "fleet");
  auto friendly = rig->make();
  rig->join(*friendly, *b);
  refused(rig->options(), "bound");
  const TransportStats stats = b->stats();
  EXPECT_EQ(stats.hellos_refused, 4u);
  EXPECT_EQ(stats.hellos_refused_by[static_cast<size_t>(HelloRefusal::kSecret)], 2u);
  EXPECT_EQ(stats.hellos_refused_by[static_cast<size_t>(HelloRefusal::kFleet)], 1u);
  EXPECT_EQ(stats.hellos_refused_by[static_cast<size_t>(HelloRefusal::kBound)], 1u);
}

TEST_P(TransportConformance, TheSecretIsChangedOneProcessAfterAnother) {
  const std::string before = rig->options().secret, after = "the secret from tomorrow on";
  const auto with = [&](const std::string& secret, const std::string& other) {
    TransportOptions options = rig->options();
    options.secret = secret;
    options.other_secret = other;
    return rig->make(options);
  };
  // Every pair of neighbouring steps meets, whoever begins: the old one, both with the old one first, both
  // with the new one first, the new one.
  const std::pair<std::string, std::string> steps[] = {
      {before, ""}, {before, after}, {after, before}, {after, ""}};
  for (size_t i = 0; i + 1 < std::size(steps); ++i) {
    auto a = with(steps[i].first, steps[i].second), b = with(steps[i + 1].first, steps[i + 1].second);
    rig->join(*a, *b);
    auto c = with(steps[i].first, steps[i].second), d = with(steps[i + 1].first, steps[i + 1].second);
    rig->join(*d, *c);
  }
}

TEST_P(TransportConformance, ASecretThatIsChangedAtRunTimeIsAskedOfNewPeersAlone) {
  const std::string before = rig->options().secret, after = "the secret from tomorrow on";
  Refusals told;
  TransportOptions options = rig->options();
  options.on_refused = told.listener();
  auto b = rig->make(options), old_peer = rig->make();
  rig->join(*old_peer, *b);
  const auto refused = [&](const std::string& secret) {
    const size_t count = told.count();
    TransportOptions other = rig->options();
    other.secret = secret;
    other.connect_deadline = 200 * kMillisecond;
    auto a = rig->make(other);
    a->connect(*b);
    return rig->wait(*b, [&] { return told.count() > count; }) && rig->saw<E::PeerDown>(*a);
  };
  const auto welcome = [&](const std::string& secret) {
    TransportOptions other = rig->options();
    other.secret = secret;
    auto a = rig->make(other);
    rig->join(*a, *b);
  };
  EXPECT_TRUE(refused(after));
  b->run([&] { b->session->set_secrets(after, before); });
  welcome(after);
  welcome(before);
  b->run([&] { b->session->set_secrets(after, ""); });
  welcome(after);
  EXPECT_TRUE(refused(before));
  EXPECT_TRUE(old_peer->is_up(b->id)) << "what is up stays up";
  EXPECT_TRUE(b->is_up(old_peer->id));
  EXPECT_EQ(b->stats().hellos_refused_by[static_cast<size_t>(HelloRefusal::kSecret)], 2u);
}

}  // namespace conclave::testing
