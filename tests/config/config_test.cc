#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "libs/base/address.h"
#include "libs/config/field_list.h"
#include "libs/config/load.h"
#include "libs/config/schema.h"

namespace conclave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string error_of(std::string_view yaml, const Environment& environment = {}) {
  auto parsed = parse_config(yaml, "c.yaml", environment);
  return parsed.ok() ? "" : message_of(parsed.status());
}

TEST(ConfigTest, EmptyTextGivesTheDefaults) {
  for (const char* text : {"", "\n", "# nothing\n", "{}", "scheduler:\n", "---\n"}) {
    auto parsed = parse_config(text, "c.yaml", {});
    ASSERT_TRUE(parsed.ok()) << text << ": " << parsed.status();
    EXPECT_EQ(config_to_yaml(parsed->config), config_to_yaml(ClusterConfig())) << text;
  }
}

TEST(ConfigTest, ReadsEveryKindOfValue) {
  auto parsed = parse_config(
      "model: {path: /m, precision: f32}\n"
      "scheduler:\n  listen: '[::1]:0'\n"
      "attention:\n  threads: 3\n  kv_bytes: 1.5MiB\n  dispatch_deadline_multiple: 2.5\n"
      "transport: {rows_crc: false, spin_us: 0.5, kind: loopback}\n",
      "c.yaml", {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const ClusterConfig& c = parsed->config;
  EXPECT_EQ(c.model.path, "/m");
  EXPECT_EQ(c.model.precision, Precision::kF32);
  EXPECT_EQ(c.scheduler.listen, "[::1]:0");
  EXPECT_EQ(c.attention.options.threads, 3u);
  EXPECT_EQ(c.attention.kv_bytes, 1536u * 1024);
  EXPECT_EQ(c.attention.options.exchange.deadline_multiple, 2.5);
  EXPECT_FALSE(c.transport.options.rows_crc);
  EXPECT_EQ(c.transport.spin, 500);
  EXPECT_EQ(c.transport.kind, TransportKind::kLoopback);
}

TEST(ConfigTest, WeightsAreNumbersByName) {
  auto parsed = parse_config("scheduler:\n  tenant_weights: alice=3, b@c.d=1000\n", "c.yaml", {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const std::map<std::string, uint32_t> want = {{"alice", 3}, {"b@c.d", 1000}};
  EXPECT_EQ(parsed->config.scheduler.options.tenant_weights, want);
  auto again = parse_config(config_to_yaml(parsed->config), "c.yaml", {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->config.scheduler.options.tenant_weights, want);
  for (const auto& [text, why] : std::map<std::string, std::string>{{"alice", "not NAME=NUMBER"},
                                                                    {"a=1,,b=2", "not NAME=NUMBER"},
                                                                    {"=4", "not NAME=NUMBER"},
                                                                    {"a=0", "1 to 1000"},
                                                                    {"a=1001", "1 to 1000"},
                                                                    {"a=x", "x"},
                                                                    {"a=1,a=2", "twice"}}) {
    EXPECT_THAT(error_of("scheduler:\n  tenant_weights: '" + text + "'\n"),
                AllOf(HasSubstr("tenant_weights"), HasSubstr(why)))
        << text;
  }
}

TEST(ConfigTest, AnUnknownKeyNamesLineAndNearestKey) {
  EXPECT_EQ(error_of("model:\n  path: /m\nscheduler:\n  lisen: 127.0.0.1:1\n"),
            "c.yaml:4: unknown key 'scheduler.lisen'; did you mean 'listen'?");
  EXPECT_EQ(error_of("shceduler:\n  listen: 127.0.0.1:1\n"),
            "c.yaml:1: unknown section 'shceduler'; did you mean 'scheduler'?");
  // Nothing is near: no guess.
  EXPECT_EQ(error_of("model: {zzzzzzzz: 1}\n"), "c.yaml:1: unknown key 'model.zzzzzzzz'");
}

TEST(ConfigTest, AllFaultsAreListedAtOnce) {
  const std::string error = error_of(
      "model:\n  precision: f16\n"
      "attention:\n  threads: many\n  thread: 1\n  kv_blocks: -1\n"
      "router:\n  http_listen: nowhere\n",
      {{"CONCLAVE_EXPERTS_THREADS", "9999"}});
  EXPECT_THAT(error, AllOf(HasSubstr("c.yaml:2: model.precision: 'f16' is none of: bf16, f32"),
                           HasSubstr("c.yaml:4: attention.threads: 'many' is not a whole number"),
                           HasSubstr("c.yaml:5: unknown key 'attention.thread'; did you mean 'threads'?"),
                           HasSubstr("c.yaml:6: attention.kv_blocks: '-1' is not a whole number"),
                           HasSubstr("c.yaml:8: router.http_listen: 'nowhere' lacks a port"),
                           HasSubstr("environment CONCLAVE_EXPERTS_THREADS: 9999 is out of range")));
}

TEST(ConfigTest, WrongTypesNameTheKey) {
  EXPECT_THAT(error_of("attention: {threads: [1]}"),
              HasSubstr("attention.threads: takes an integer, found a list"));
  EXPECT_THAT(error_of("attention: {threads: {a: 1}}"), HasSubstr("found a mapping"));
  EXPECT_THAT(error_of("attention: {threads: }"),
              HasSubstr("attention.threads: takes an integer, found nothing"));
  EXPECT_THAT(error_of("attention: {threads: '4'}"), HasSubstr("write it without quotes"));
  EXPECT_THAT(error_of("attention: {threads: 1.5}"), HasSubstr("'1.5' is not a whole number"));
  EXPECT_THAT(error_of("attention: {threads: 99999999999999999999}"), HasSubstr("is too large"));
  EXPECT_THAT(error_of("attention: 4"),
              HasSubstr("attention: takes a mapping of keys, found a single value"));
  EXPECT_THAT(error_of("[1, 2]"), HasSubstr("must be a mapping of sections, found a list"));
  EXPECT_THAT(error_of("transport: {rows_crc: yes}"), HasSubstr("'yes' is neither true nor false"));
  EXPECT_THAT(error_of("transport: {spin_us: nan}"), HasSubstr("'nan' is not a number"));
  EXPECT_THAT(error_of("attention: {kv_bytes: 3 apples}"),
              HasSubstr("attention.kv_bytes: '3 apples' is no size"));
  EXPECT_THAT(error_of("attention: {kv_bytes: 0.3KiB}"), HasSubstr("not a whole number of bytes"));
  EXPECT_THAT(error_of("attention: {threads: 1, threads: 2}"), HasSubstr("attention.threads: given twice"));
  EXPECT_THAT(error_of("model: {}\nmodel: {}\n"), HasSubstr("section 'model' is given twice"));
  EXPECT_THAT(error_of("model: {path: \"a\\nb\"}"), HasSubstr("model.path: has a control character"));
  EXPECT_THAT(error_of("model: [\n"), HasSubstr("is not valid YAML"));
  EXPECT_THAT(error_of("a: 1\n---\nb: 1\n"), HasSubstr("several YAML documents"));
  EXPECT_THAT(error_of(std::string(kMaxConfigBytes + 1, ' ')), HasSubstr("bytes long"));
}

TEST(ConfigTest, ManyFaultsAreCountedPastTheBound) {
  std::string yaml = "model:\n";
  for (int i = 0; i < 70; ++i) yaml += "  k" + std::to_string(i) + ": 1\n";
  EXPECT_THAT(error_of(yaml), HasSubstr("... and 20 more faults"));
}

TEST(ConfigTest, KeysThatContradictAreNamed) {
  EXPECT_THAT(error_of("control: {reconnect_min_ms: 500, reconnect_max_ms: 100}"),
              HasSubstr("control.reconnect_min_ms is larger than control.reconnect_max_ms"));
  EXPECT_THAT(error_of("scheduler: {steps_in_flight: 2, dead_after_ms: 100}"),
              HasSubstr("scheduler.dead_after_ms: "));
  EXPECT_THAT(error_of("attention: {missing_retry_ms: 9, missing_retry_cap_ms: 8}"),
              HasSubstr("attention.missing_retry_ms is larger than attention.missing_retry_cap_ms"));
  EXPECT_THAT(error_of("transport: {keepalive_timeout_ms: 100}"),
              HasSubstr("transport.keepalive_interval_ms is larger than transport.keepalive_timeout_ms"));
  EXPECT_THAT(error_of("transport: {max_rows: 100, max_items: 200}"),
              AllOf(HasSubstr("attention.max_dispatch_rows is larger than transport.max_rows"),
                    HasSubstr("attention.max_dispatch_items is larger than transport.max_items")));
  EXPECT_THAT(error_of("attention: {max_queued_plans: 1}"),
              HasSubstr("attention.max_queued_plans must be at least twice scheduler.steps_in_flight"));
  EXPECT_THAT(error_of("control: {queue_messages: 16}"),
              HasSubstr("control.max_open_requests is larger than control.queue_messages"));
  EXPECT_THAT(error_of("transport: {interface: ''}"),
              HasSubstr("transport.interface must name a network device"));
}

TEST(ConfigTest, TheEnvironmentOverridesTheFile) {
  const Environment environment = {{"CONCLAVE_SCHEDULER_LISTEN", "127.0.0.1:9"},
                                   {"CONCLAVE_ATTENTION_KV_BYTES", "2MiB"},
                                   {"CONCLAVE_ISA", "avx2"},
                                   {"CONCLAVE_URL", "http://127.0.0.1:1"},
                                   {"CONCLAVE_TESTDATA_DIR", "/x"},
                                   {"CONCLAVE_SCHEDULER_LISTE", "1"},
                                   {"CONCLAVE_SCHEDULER_PORT", "tcp://10.0.0.1:7070"},
                                   {"CONCLAVE_ROUTER_SERVICE_HOST", "10.0.0.1"},
                                   {"PATH", "/bin"}};
  auto parsed = parse_config("scheduler: {listen: 127.0.0.1:8}\n", "c.yaml", environment);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.scheduler.listen, "127.0.0.1:9");
  EXPECT_EQ(parsed->config.attention.kv_bytes, 2u << 20);
  EXPECT_THAT(parsed->warnings, ElementsAre(AllOf(HasSubstr("CONCLAVE_SCHEDULER_LISTE is no config key"),
                                                  HasSubstr("did you mean 'CONCLAVE_SCHEDULER_LISTEN'?"))));
}

TEST(ConfigTest, AnAddressWithoutAHostMeansEveryInterface) {
  auto parsed = parse_config("router: {http_listen: ':80', grpc_listen: ''}\n", "c.yaml", {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.router.http_listen, "0.0.0.0:80");
  EXPECT_EQ(parsed->config.router.grpc_listen, "");
}

TEST(ConfigTest, TheProcessEnvironmentIsRead) {
  ASSERT_EQ(setenv("CONCLAVE_MODEL_NAME", "a=b", 1), 0);
  EXPECT_EQ(process_environment().at("CONCLAVE_MODEL_NAME"), "a=b");
  unsetenv("CONCLAVE_MODEL_NAME");
  EXPECT_EQ(process_environment().count("PATH"), 0u);
}

TEST(ConfigTest, WrittenYamlReadsBackEqualForEveryKey) {
  // Every key is moved away from its default first, so that a key the writer or reader forgot shows.
  ClusterConfig changed;
  size_t moved = 0;
  for (const ConfigField& field : config_fields(changed)) {
    const std::string before = field.get();
    for (const char* candidate : {"127.0.0.1:1234", "f32", "loopback", "debug", "true", "false", "7", "0.5", "4096",
                                  "a=2", "77777", "5MiB", "a \"quoted\\ path: # x"}) {
      if (field.set(candidate).ok() && field.get() != before) break;
    }
    EXPECT_NE(field.get(), before) << field.name();
    moved += field.get() != before;
  }
  ASSERT_GT(moved, 50u);
  // Some go together, and some have a form.
  changed.attention.options.max_queued_plans = 14;
  changed.model.fp8_wire = false;
  changed.attention.processors.cpus = "0-3,8";
  changed.experts.processors.cpus = "numa:1";
  const std::string yaml = config_to_yaml(changed);
  auto parsed = parse_config(yaml, "c.yaml", {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(config_to_yaml(parsed->config), yaml);
}

TEST(ConfigTest, ProcessorsAndTheFp8WireAreCheckedBeforeAnythingStarts) {
  const auto refused = [](const std::string& yaml) {
    const auto parsed = parse_config(yaml, "c.yaml", {});
    return parsed.ok() ? std::string() : message_of(parsed.status());
  };
  EXPECT_THAT(refused("attention: {cpus: \"0-\"}"), HasSubstr("attention.cpus must be a list"));
  EXPECT_THAT(refused("experts: {cpus: \"0,,1\"}"), HasSubstr("experts.cpus must be a list"));
  EXPECT_THAT(refused("model: {fp8_wire: true, precision: f32}"), HasSubstr("model.fp8_wire needs"));
  EXPECT_EQ(refused("experts: {cpus: \"numa:63\"}"), "") << "which nodes there are is seen where it runs";
  const auto parsed =
      parse_config("model: {fp8_wire: true}\nattention: {cpus: \"1,2\", pin_threads: true}", "c.yaml", {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(parsed->config.model.fp8_wire);
  EXPECT_TRUE(parsed->config.attention.processors.pin_threads);
  EXPECT_FALSE(parsed->config.experts.processors.pin_threads);
}

TEST(ConfigTest, KeysAndEnvironmentNamesAreUniqueAndDocumented) {
  ClusterConfig config;
  std::set<std::string> names, variables;
  for (const ConfigField& field : config_fields(config)) {
    EXPECT_TRUE(names.insert(field.name()).second) << field.name();
    EXPECT_TRUE(variables.insert(field.environment_name()).second) << field.name();
    EXPECT_FALSE(field.doc.empty()) << field.name();
    EXPECT_TRUE(field.set(field.get()).ok()) << field.name() << " refuses its own default " << field.get();
  }
}

TEST(ConfigTest, TheCommittedPageIsCurrent) {
  // UPDATE_DOCS=1 writes the page instead.
  if (std::getenv("UPDATE_DOCS") != nullptr) std::ofstream("docs/config.md") << config_markdown();
  std::ifstream in("docs/config.md");
  ASSERT_TRUE(in.is_open());
  std::ostringstream page;
  page << in.rdbuf();
  EXPECT_EQ(page.str(), config_markdown()) << "run config_test with UPDATE_DOCS=1 and commit docs/config.md";
}

TEST(ConfigTest, FilesThatCannotBeRead) {
  EXPECT_EQ(load_config_file("/nowhere/c.yaml", {}).status().code(), StatusCode::kNotFound);
  EXPECT_THAT(message_of(load_config_file("/tmp", {}).status()), HasSubstr("is a directory"));
  EXPECT_TRUE(load_config_file("", {}).ok());
}

TEST(AddressTest, HostPort) {
  EXPECT_EQ(parse_host_port("127.0.0.1:80")->text(), "127.0.0.1:80");
  EXPECT_EQ(parse_host_port("[::1]:0")->text(), "[::1]:0");
  EXPECT_EQ(parse_host_port(":80")->text(), "0.0.0.0:80");
  for (const char* bad : {"", "localhost", "a:", "a:b", "a:65536", "a:-1", "::1:80", "[::1]", "[::1:80",
                          "[]:1", "a b:1", "[x]:1", "a:123456"}) {
    EXPECT_FALSE(parse_host_port(bad).ok()) << bad;
  }
}

TEST(SecretTest, OneOrTwoLines) {
  const std::string a = "0123456789abcdef", b = "another secret of the cluster";
  EXPECT_THAT(*parse_secrets(a), ::testing::ElementsAre(a));
  EXPECT_THAT(*parse_secrets(" " + a + " \r\n\n"), ::testing::ElementsAre(a));
  EXPECT_THAT(*parse_secrets(a + "\n" + b), ::testing::ElementsAre(a, b));
  EXPECT_THAT(*parse_secrets("\n\n" + b + "\n\n" + a + "\n"), ::testing::ElementsAre(b, a));
  const std::pair<std::string, const char*> refused[] = {
      {"", "is empty"},
      {" \n\r\n", "is empty"},
      {"0123456789abcde", "fewer than 16 bytes"},
      {a + "\nshort", "fewer than 16 bytes"},
      {a + "\n" + a, "has a secret twice"},
      {a + "\n" + b + "\n" + b + "!", "more than two lines"},
  };
  for (const auto& [text, why] : refused) {
    const Status status = parse_secrets(text).status();
    EXPECT_THAT(message_of(status), HasSubstr(why)) << text;
    EXPECT_EQ(field_of(status), "transport.secret_file");
    EXPECT_THAT(message_of(status), Not(HasSubstr("0123"))) << "an error must not show the secret";
  }
}

TEST(ConfigTest, FilesOfTlsGoTogether) {
  const auto parsed = [](const std::string& tls) {
    return parse_config("tls:\n" + tls, "c.yaml", {}).status();
  };
  EXPECT_TRUE(parsed("  ca_file: a\n  cert_file: b\n  key_file: c\n  server_name: s\n").ok());
  EXPECT_THAT(message_of(parsed("  ca_file: a\n")),
              AllOf(HasSubstr("tls.cert_file is not set"), HasSubstr("tls.key_file is not set"),
                    Not(HasSubstr("tls.ca_file is not set"))));
  EXPECT_THAT(message_of(parsed("  cert_file: b\n  key_file: c\n")), HasSubstr("tls.ca_file is not set"));
  EXPECT_THAT(message_of(parsed("  server_name: s\n")), HasSubstr("tls.server_name has no effect without"));
  EXPECT_THAT(message_of(parsed("  client_names: a,b\n")),
              HasSubstr("tls.client_names has no effect without"));
}

TEST(NearestNameTest, OnlyWhatIsNear) {
  EXPECT_EQ(nearest_name("thread", {"threads", "listen"}), "threads");
  EXPECT_EQ(nearest_name("qqq", {"threads", "listen"}), "");
  EXPECT_THAT(nearest_name(std::string(100000, 'x'), {"threads"}), IsEmpty());
}

}  // namespace
}  // namespace conclave
