#include "libs/tls/identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/tls/certificates.h"

namespace conclave::tls {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class IdentityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory = ::testing::TempDir() + "conclave_identity_" + std::to_string(getpid()) + "_" +
                ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(directory);
  }
  void TearDown() override { std::filesystem::remove_all(directory); }

  Options write(const std::string& name, const std::string& authorities, const Leaf& leaf) {
    Options options = write_files(directory + "/" + name, authorities, leaf);
    options.reload_interval = 0;  // a look at each call
    return options;
  }
  std::shared_ptr<Identity> load(const Options& options, Use use = Use::kServer) {
    auto identity = Identity::load(options, use);
    EXPECT_TRUE(identity.ok()) << identity.status();
    return identity.ok() ? *std::move(identity) : nullptr;
  }
  Status refusal(const Options& options, Use use = Use::kServer) {
    return Identity::load(options, use).status();
  }
  static std::string verdict(Identity& identity, const std::string& certificate,
                             const std::string& chain = "", Use use = Use::kClient,
                             const std::string& name = "") {
    const Identity::Verdict verdict = identity.judge(use, certificate, chain, name);
    return verdict.refused ? std::string(refusal_name(*verdict.refused)) : "welcome";
  }

  std::string directory;
  Authority ca{"authority"};
};

TEST_F(IdentityTest, PeersOfTheAuthorityAreWelcomeAndOthersAreNot) {
  const auto identity = load(write("own", ca.pem(), ca.issue()));
  ASSERT_NE(identity, nullptr);
  std::vector<std::string> told;
  identity->observe({[&told](Refusal refusal, const std::string& detail) {
                       told.push_back(std::string(refusal_name(refusal)) + ": " + detail);
                     },
                     nullptr});
  EXPECT_EQ(verdict(*identity, ca.issue().certificate), "welcome");
  EXPECT_TRUE(told.empty());

  EXPECT_EQ(verdict(*identity, ""), "no_certificate");
  EXPECT_EQ(verdict(*identity, Authority("another").issue().certificate), "unknown_ca");
  // One that calls itself as ours does.
  EXPECT_EQ(verdict(*identity, Authority("authority").issue().certificate), "unknown_ca");
  Wish expired, early, server_only;
  expired.ends_s = -1;
  early.begins_s = 600;
  server_only.usage = "serverAuth";
  EXPECT_EQ(verdict(*identity, ca.issue(expired).certificate), "expired");
  EXPECT_EQ(verdict(*identity, ca.issue(early).certificate), "not_yet_valid");
  EXPECT_EQ(verdict(*identity, ca.issue(server_only).certificate), "bad_certificate");
  // A leaf is no authority.
  EXPECT_EQ(verdict(*identity, Authority("x").issue().certificate, ca.issue().certificate), "unknown_ca");
  for (const std::string& garbage :
       {std::string("garbage"), std::string("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        std::string(kMaxFileBytes + 1, 'A'), ca.issue().certificate.substr(0, 200)}) {
    EXPECT_EQ(verdict(*identity, garbage), "bad_certificate");
  }
  EXPECT_EQ(verdict(*identity, ca.issue().certificate, "garbage"), "bad_certificate");

  EXPECT_EQ(told.size(), 12u);
  EXPECT_THAT(told[1], AllOf(HasSubstr("unknown_ca: "), HasSubstr("CN=node (issued by CN=another)")));
  EXPECT_THAT(told[3], HasSubstr("it ended at 2"));
  const Identity::Figures figures = identity->figures();
  EXPECT_EQ(figures.refused[static_cast<size_t>(Refusal::kUnknownCa)], 3u);
  EXPECT_EQ(figures.refused[static_cast<size_t>(Refusal::kExpired)], 1u);
  EXPECT_EQ(figures.refused[static_cast<size_t>(Refusal::kBadCertificate)], 6u);
  EXPECT_NEAR(static_cast<double>(figures.expires_s), static_cast<double>(std::time(nullptr) + 24 * 3600),
              60);
}

TEST_F(IdentityTest, AServerIsJudgedByItsName) {
  const auto identity = load(write("own", ca.pem(), ca.issue()), Use::kClient);
  Wish wish;
  wish.dns = {"conclave-scheduler", "*.conclave.svc"};
  wish.addresses = {"10.0.0.7"};
  wish.name = "common.name";
  const std::string server = ca.issue(wish).certificate;
  const std::pair<const char*, const char*> names[] = {
      {"conclave-scheduler", "welcome"}, {"x.conclave.svc", "welcome"},
      {"10.0.0.7", "welcome"},           {"10.0.0.8", "wrong_name"},
      {"conclave", "wrong_name"},        {"a.x.conclave.svc", "wrong_name"},
      {"common.name", "wrong_name"},     {"", "wrong_name"}};
  for (const auto& [name, expected] : names)
    EXPECT_EQ(verdict(*identity, server, "", Use::kServer, name), expected) << name;
  wish.usage = "clientAuth";
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate, "", Use::kServer, "conclave-scheduler"),
            "bad_certificate");
}

TEST_F(IdentityTest, ClientsMayHaveToBearANameOfTheList) {
  Options options = write("own", ca.pem(), ca.issue());
  options.client_names = "conclave-member, spiffe://cluster/ns/conclave";
  const auto identity = load(options);
  Wish wish;
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate), "wrong_name");
  wish.dns = {"*"};  // not read as a pattern
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate), "wrong_name");
  wish.name = "conclave-member";  // the common name is for people
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate), "wrong_name");
  wish.dns = {"other", "conclave-member"};
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate), "welcome");
  wish.dns.clear();
  wish.uris = {"spiffe://cluster/ns/conclave"};
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate), "welcome");
  wish.uris = {"spiffe://cluster/ns/conclave/more"};
  EXPECT_EQ(verdict(*identity, ca.issue(wish).certificate), "wrong_name");

  options.client_names = "a,,b";
  EXPECT_EQ(field_of(refusal(options)), "tls.client_names");
  options.client_names = "a";
  for (size_t i = 0; i < kMaxClientNames; ++i) options.client_names += ",a";
  EXPECT_EQ(field_of(refusal(options)), "tls.client_names");
}

TEST_F(IdentityTest, ChainsLeadToTheAuthority) {
  const Authority middle = ca.intermediate("middle");
  Leaf leaf = middle.issue();
  const auto identity = load(write("own", ca.pem(), ca.issue()));
  EXPECT_EQ(verdict(*identity, leaf.certificate, middle.pem()), "welcome");
  EXPECT_EQ(verdict(*identity, leaf.certificate, leaf.certificate + middle.pem()), "welcome");
  EXPECT_EQ(verdict(*identity, leaf.certificate), "unknown_ca");
  // Our own chain comes from the same file as our certificate.
  leaf.certificate += middle.pem();
  EXPECT_NE(load(write("chain", ca.pem(), leaf)), nullptr);
  // An authority that is itself vouched for is believed where it is named.
  const auto of_middle = load(write("middle", middle.pem(), leaf));
  EXPECT_EQ(verdict(*of_middle, middle.issue().certificate), "welcome");
  EXPECT_EQ(verdict(*of_middle, ca.issue().certificate), "unknown_ca");
  // A chain without end.
  std::string chain;
  Authority last = ca.intermediate("0");
  chain += last.pem();
  for (int i = 1; i <= kMaxChain + 1; ++i) {
    last = last.intermediate(std::to_string(i));
    chain += last.pem();
  }
  EXPECT_EQ(verdict(*identity, last.issue().certificate, chain), "bad_certificate");
}

TEST_F(IdentityTest, FilesThatDoNotDoAreNamed) {
  const Leaf good = ca.issue();
  Options options = write("own", ca.pem(), good);
  for (std::string Options::*file : {&Options::ca_file, &Options::cert_file, &Options::key_file}) {
    const std::string key = file == &Options::ca_file     ? "tls.ca_file"
                            : file == &Options::cert_file ? "tls.cert_file"
                                                          : "tls.key_file";
    const auto with = [&](const std::string& text) {
      Options bad = options;
      bad.*file = directory + "/bad";
      std::ofstream(bad.*file, std::ios::trunc) << text;
      return refusal(bad);
    };
    Options missing = options;
    missing.*file = directory + "/missing";
    EXPECT_THAT(message_of(refusal(missing)), HasSubstr("cannot read " + directory + "/missing"));
    EXPECT_EQ(field_of(refusal(missing)), key);
    EXPECT_EQ(field_of(with("")), key);
    EXPECT_EQ(field_of(with("garbage\n")), key);
    EXPECT_EQ(field_of(with(std::string(kMaxFileBytes + 1, 'x'))), key);
    EXPECT_THAT(message_of(with(std::string(kMaxFileBytes + 1, 'x'))), HasSubstr("has more than"));
  }
  const auto of = [&](const Wish& wish, Use use = Use::kServer) {
    return refusal(write("own", ca.pem(), ca.issue(wish)), use);
  };
  Wish wish;
  wish.ends_s = -5;
  EXPECT_THAT(message_of(of(wish)), AllOf(HasSubstr("tls.cert_file"), HasSubstr("has expired at 2")));
  wish = {};
  wish.begins_s = 600;
  EXPECT_THAT(message_of(of(wish)), AllOf(HasSubstr("tls.cert_file"), HasSubstr("is not valid before 2")));
  wish = {};
  wish.usage = "clientAuth";
  EXPECT_TRUE(of(wish, Use::kClient).ok());
  EXPECT_THAT(message_of(of(wish)), AllOf(HasSubstr("tls.cert_file"), HasSubstr("is of no use here")));
  Leaf mixed = ca.issue();
  mixed.key = good.key;
  const Status other_key = refusal(write("own", ca.pem(), mixed));
  EXPECT_EQ(field_of(other_key), "tls.key_file");
  EXPECT_THAT(message_of(other_key), HasSubstr("is not the key of the certificate"));
  const Status other_authority = refusal(write("own", Authority("another").pem(), good));
  EXPECT_EQ(field_of(other_authority), "tls.cert_file");
  EXPECT_THAT(message_of(other_authority), Not(HasSubstr("PRIVATE")));
}

TEST_F(IdentityTest, ChangedFilesAreTakenAndBadOnesAreNot) {
  const Authority next("next authority");
  const auto identity = load(write("own", ca.pem(), ca.issue()));
  std::vector<Status> told;
  identity->observe({nullptr, [&told](const Status& outcome) { told.push_back(outcome); }});
  EXPECT_EQ(verdict(*identity, next.issue().certificate), "unknown_ca");
  EXPECT_TRUE(told.empty()) << "nothing has changed";

  // The new authority is believed beside the old one, then alone.
  write("own", ca.pem() + next.pem(), ca.issue());
  EXPECT_EQ(verdict(*identity, next.issue().certificate), "welcome");
  EXPECT_EQ(verdict(*identity, ca.issue().certificate), "welcome");
  write("own", next.pem(), next.issue());
  EXPECT_EQ(verdict(*identity, ca.issue().certificate), "unknown_ca");
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(told[0].ok() && told[1].ok());

  // Sets that do not hold together leave the one before in force.
  Leaf mixed = next.issue();
  mixed.key = next.issue().key;
  write("own", next.pem(), mixed);
  EXPECT_EQ(verdict(*identity, next.issue().certificate), "welcome");
  write("own", ca.pem(), next.issue());
  EXPECT_EQ(verdict(*identity, next.issue().certificate), "welcome");
  ASSERT_EQ(told.size(), 4u);
  EXPECT_EQ(field_of(told[2]), "tls.key_file");
  EXPECT_EQ(field_of(told[3]), "tls.cert_file");
  EXPECT_EQ(identity->figures().reloads, 2u);
  EXPECT_EQ(identity->figures().failed_reloads, 2u);
  std::filesystem::remove(directory + "/own");
  EXPECT_EQ(verdict(*identity, next.issue().certificate), "welcome");
  EXPECT_EQ(identity->figures().failed_reloads, 3u);
}

TEST_F(IdentityTest, TheFilesAreLookedAtOnceInAWhile) {
  Options options = write("own", ca.pem(), ca.issue());
  options.reload_interval = 3600 * kSecond;
  const auto identity = load(options);
  const Authority next("next");
  write("own", next.pem(), next.issue());
  EXPECT_EQ(verdict(*identity, ca.issue().certificate), "welcome");
  EXPECT_EQ(identity->figures().reloads, 0u);
}

TEST_F(IdentityTest, ACertificateThatEndsWhileConnectionsComeIsRefusedFromThenOn) {
  std::atomic<int64_t> now{static_cast<int64_t>(std::time(nullptr))};
  auto identity =
      Identity::load(write("own", ca.pem(), ca.issue()), Use::kServer, [&now] { return now.load(); });
  ASSERT_TRUE(identity.ok()) << identity.status();
  Wish wish;
  wish.ends_s = 600;
  const std::string peer = ca.issue(wish).certificate;
  EXPECT_EQ(verdict(**identity, peer), "welcome");
  now += 599;
  EXPECT_EQ(verdict(**identity, peer), "welcome");
  now += 5;
  EXPECT_EQ(verdict(**identity, peer), "expired");
}

TEST_F(IdentityTest, ManyThreadsJudgeWhileFilesChange) {
  const auto identity = load(write("own", ca.pem(), ca.issue()));
  const std::string peer = ca.issue().certificate, stranger = Authority("x").issue().certificate;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        if (verdict(*identity, peer) != "welcome" || verdict(*identity, stranger) != "unknown_ca") ++wrong;
      }
    });
  }
  for (int i = 0; i < 5; ++i) write("own", ca.pem(), ca.issue());
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(identity->figures().refused[static_cast<size_t>(Refusal::kUnknownCa)], 80u);
}

}  // namespace
}  // namespace conclave::tls
