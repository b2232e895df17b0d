// Every method of conclave.v1.Inference besides the plain Generate: what it answers, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "tests/router/grpc_fixture.h"

namespace conclave::router {
namespace {

using testing::byte_tokens;
using testing::fake_logprob;
using ::testing::HasSubstr;

constexpr char kCalls[] =
    "I should look.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n"
    "<parameter name=\"city\">K\xc3\xb6ln</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n"
    "</minimax:tool_call>";

// The model calls a tool, whatever it is asked.
class GrpcChatTest : public GrpcTest {
 protected:
  GrpcChatTest() : GrpcTest({}, [](const AcceptedRequest&) { return byte_tokens(kCalls); }) {
    text.starts_in_reasoning = true;
    v1::ChatMessage* message = request.add_messages();
    message->set_role("user");
    message->set_content("hi");
    v1::Tool* tool = request.add_tools();
    tool->set_name("get_weather");
    tool->set_parameters(
        R"({"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}}})");
  }
  grpc::Status chat(v1::ChatResponse* response) {
    grpc::ClientContext context;
    const grpc::Status status = stub->Chat(&context, request, response);
    const auto& trailing = context.GetServerTrailingMetadata();
    const auto at = trailing.find("conclave-field");
    field = at == trailing.end() ? "" : std::string(at->second.data(), at->second.size());
    return status;
  }
  v1::ChatRequest request;
};

class SlowGrpcMethodsTest : public GrpcTest {
 protected:
  SlowGrpcMethodsTest() : GrpcTest(std::chrono::milliseconds(2)) {}
};

TEST_F(GrpcChatTest, AnswersWithReasoningAndCalls) {
  v1::ChatResponse response;
  request.set_n(2);
  ASSERT_TRUE(chat(&response).ok());
  ASSERT_EQ(response.choices_size(), 2);
  for (const v1::ChatChoice& choice : response.choices()) {
    EXPECT_EQ(choice.reasoning_content(), "I should look.");
    EXPECT_EQ(choice.content(), "Let me see.");
    EXPECT_EQ(choice.finish_reason(), "tool_calls");
    ASSERT_EQ(choice.tool_calls_size(), 1);
    EXPECT_EQ(choice.tool_calls(0).name(), "get_weather");
    EXPECT_EQ(choice.tool_calls(0).arguments(), "{\"city\": \"K\xc3\xb6ln\", \"days\": 3}");
    EXPECT_FALSE(choice.tool_calls(0).id().empty());
  }
  EXPECT_EQ(response.usage().completion_tokens(), 2 * (sizeof(kCalls)));
  EXPECT_EQ(response.usage().reasoning_tokens(), 2u * 23);
  EXPECT_EQ(response.model(), "fake-m2");
}

TEST_F(GrpcChatTest, StreamsTheSame) {
  v1::ChatResponse whole;
  ASSERT_TRUE(chat(&whole).ok());
  grpc::ClientContext context;
  auto reader = stub->ChatStream(&context, request);
  v1::ChatChunk chunk;
  v1::ChatChoice sum;
  int chunks = 0;
  bool usage = false;
  while (reader->Read(&chunk)) {
    EXPECT_EQ(chunk.id().empty(), chunks++ > 0);
    EXPECT_FALSE(usage) << "a chunk after the last";
    sum.mutable_content()->append(chunk.content());
    sum.mutable_reasoning_content()->append(chunk.reasoning_content());
    for (const v1::ToolCallDelta& delta : chunk.tool_calls()) {
      if (static_cast<int>(delta.index()) == sum.tool_calls_size()) {
        sum.add_tool_calls()->set_name(delta.name());
        EXPECT_FALSE(delta.id().empty());
      }
      ASSERT_LT(static_cast<int>(delta.index()), sum.tool_calls_size());
      sum.mutable_tool_calls(static_cast<int>(delta.index()))->mutable_arguments()->append(delta.arguments());
    }
    if (!chunk.finish_reason().empty()) sum.set_finish_reason(chunk.finish_reason());
    usage = chunk.has_usage();
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(usage);
  EXPECT_EQ(chunk.usage().completion_tokens(), whole.usage().completion_tokens());
  const v1::ChatChoice& expected = whole.choices(0);
  EXPECT_EQ(sum.content(), expected.content());
  EXPECT_EQ(sum.reasoning_content(), expected.reasoning_content());
  EXPECT_EQ(sum.finish_reason(), expected.finish_reason());
  ASSERT_EQ(sum.tool_calls_size(), 1);
  EXPECT_EQ(sum.tool_calls(0).arguments(), expected.tool_calls(0).arguments());
}

TEST_F(GrpcChatTest, ToolChoiceReasoningFormatAndHistory) {
  request.set_tool_choice("none");
  request.set_reasoning_format("none");
  v1::ChatResponse response;
  ASSERT_TRUE(chat(&response).ok());
  EXPECT_EQ(response.choices(0).content(), kCalls);
  EXPECT_EQ(response.choices(0).finish_reason(), "stop");
  // A turn with calls and their result goes back in.
  v1::ChatMessage* turn = request.add_messages();
  turn->set_role("assistant");
  turn->set_reasoning_content("I should look.");
  v1::ToolCall* call = turn->add_tool_calls();
  call->set_id("call_1");
  call->set_name("get_weather");
  call->set_arguments("{\"city\": \"Bonn\"}");
  v1::ChatMessage* result = request.add_messages();
  result->set_role("tool");
  result->set_tool_call_id("call_1");
  result->add_parts("sunny");
  grpc::ClientContext context;
  v1::TokenizeRequest tokenize;
  *tokenize.mutable_chat() = request;
  v1::TokenizeResponse tokens;
  ASSERT_TRUE(stub->Tokenize(&context, tokenize, &tokens).ok());
  std::string prompt;
  for (const std::string& piece : tokens.texts()) prompt += piece;
  EXPECT_THAT(prompt, HasSubstr(R"("reasoning_content": "I should look.")"));
  EXPECT_THAT(prompt, HasSubstr(R"("arguments": {"city": "Bonn"})"));
  EXPECT_THAT(prompt, HasSubstr("sunny"));
}

TEST_F(GrpcChatTest, BadInputNamesTheField) {
  const v1::ChatRequest good = request;
  const auto refused = [&](const std::function<void(v1::ChatRequest&)>& change) {
    request = good;
    change(request);
    v1::ChatResponse response;
    const grpc::Status status = chat(&response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), ::testing::StartsWith(field));
    return field;
  };
  EXPECT_EQ(refused([](auto& r) { r.clear_messages(); }), "messages");
  EXPECT_EQ(refused([](auto& r) { r.mutable_messages(0)->set_role("robot"); }), "messages[0].role");
  EXPECT_EQ(refused([](auto& r) { r.mutable_messages(0)->clear_content(); }), "messages[0].content");
  EXPECT_EQ(refused([](auto& r) { r.mutable_messages(0)->set_content(std::string(5000, 'x')); }),
            "messages[0]");
  EXPECT_EQ(refused([](auto& r) { r.mutable_messages(0)->set_content("refuse-me"); }), "messages");
  EXPECT_EQ(refused([](auto& r) { r.mutable_tools(0)->set_parameters("{"); }), "tools[0].parameters");
  EXPECT_EQ(refused([](auto& r) { r.mutable_tools(0)->clear_name(); }), "tools[0].function.name");
  EXPECT_EQ(refused([](auto& r) { r.set_tool_choice("required"); }), "tool_choice");
  EXPECT_EQ(refused([](auto& r) { r.set_reasoning_format("x"); }), "reasoning_format");
  EXPECT_EQ(refused([](auto& r) { r.set_n(0); }), "n");
  EXPECT_EQ(refused([](auto& r) { r.set_top_logprobs(-1); }), "top_logprobs");
  EXPECT_EQ(refused([](auto& r) { r.set_presence_penalty(3); }), "presence_penalty");
  EXPECT_EQ(refused([](auto& r) { (*r.mutable_logit_bias())[-1] = 1; }), "logit_bias");
}

TEST_F(GrpcTest, ZeroIsAValueAndAbsentIsTheDefault) {
  v1::GenerateRequest request;
  request.set_text("ab");
  ASSERT_TRUE(call(request).ok());
  request.set_temperature(0);
  request.set_top_k(0);
  request.set_seed(-1);
  (*request.mutable_logit_bias())[65] = 0;
  v1::GenerateResponse response;
  ASSERT_TRUE(call(request, &response).ok());
  request.set_max_tokens(0);
  EXPECT_EQ(call(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(field, "max_tokens");
}

TEST_F(GrpcTest, ChoicesAndLogprobs) {
  v1::GenerateRequest request;
  request.set_text("ab");
  request.set_n(3);
  request.set_logprobs(true);
  request.set_top_logprobs(2);
  request.set_prompt_logprobs(1);
  v1::GenerateResponse response;
  ASSERT_TRUE(call(request, &response).ok());
  ASSERT_EQ(response.choices_size(), 3);
  EXPECT_EQ(response.text(), "ab");
  ASSERT_EQ(response.prompt_logprobs_size(), 1);
  EXPECT_EQ(response.prompt_logprobs(0).token().text(), "b");
  EXPECT_EQ(response.prompt_logprobs(0).top_size(), 1);
  for (const v1::Choice& choice : response.choices()) {
    EXPECT_EQ(choice.text(), "ab");
    ASSERT_EQ(choice.logprobs_size(), 3);
    EXPECT_FLOAT_EQ(choice.logprobs(1).token().logprob(), fake_logprob('b'));
    ASSERT_EQ(choice.logprobs(1).top_size(), 2);
    EXPECT_EQ(choice.logprobs(1).top(1).text(), "c");
  }
  grpc::ClientContext context;
  auto reader = stub->GenerateStream(&context, request);
  v1::GenerateChunk chunk;
  std::map<uint32_t, v1::Choice> sums;
  int prompt_logprobs = 0;
  while (reader->Read(&chunk)) {
    prompt_logprobs += chunk.prompt_logprobs_size();
    sums[chunk.choice()].mutable_text()->append(chunk.text());
    sums[chunk.choice()].mutable_logprobs()->MergeFrom(chunk.logprobs());
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(prompt_logprobs, 1);
  ASSERT_EQ(sums.size(), 3u);
  for (const auto& [index, sum] : sums) {
    EXPECT_EQ(sum.text(), "ab");
    EXPECT_EQ(sum.logprobs_size(), 3);
  }
}

TEST_F(GrpcTest, TokenizeDetokenizeAndModelInfo) {
  v1::TokenizeRequest tokenize;
  tokenize.set_text("ab");
  v1::TokenizeResponse tokens;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub->Tokenize(&context, tokenize, &tokens).ok());
  }
  ASSERT_EQ(tokens.ids_size(), 2);
  EXPECT_EQ(tokens.ids(1), 98u);
  EXPECT_EQ(tokens.texts(1), "b");
  EXPECT_EQ(tokens.context_length(), 4096u);
  v1::DetokenizeRequest detokenize;
  detokenize.add_ids(97);
  detokenize.add_ids(257);
  v1::DetokenizeResponse text_back;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub->Detokenize(&context, detokenize, &text_back).ok());
  }
  EXPECT_EQ(text_back.text(), "a<|x|>");
  detokenize.add_ids(264);
  {
    grpc::ClientContext context;
    EXPECT_EQ(stub->Detokenize(&context, detokenize, &text_back).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
  tokenize.set_model("other");
  {
    grpc::ClientContext context;
    EXPECT_EQ(stub->Tokenize(&context, tokenize, &tokens).error_code(), grpc::StatusCode::NOT_FOUND);
  }
  v1::ModelInfoResponse info;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub->ModelInfo(&context, {}, &info).ok());
  }
  EXPECT_EQ(info.model(), "fake-m2");
  EXPECT_EQ(info.context_length(), 4096u);
  EXPECT_FLOAT_EQ(info.default_temperature(), 0.7f);
  EXPECT_FALSE(info.has_default_min_p());
  EXPECT_TRUE(info.ready());
}

TEST_F(SlowGrpcMethodsTest, AbortEndsOpenRequestsByEitherName) {
  const auto abort = [&](const std::string& id) {
    v1::AbortRequest request;
    request.set_id(id);
    v1::AbortResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub->Abort(&context, request, &response).ok());
    return response.aborted();
  };
  EXPECT_EQ(abort("nobody"), 0u);
  for (const bool by_name : {false, true}) {
    v1::GenerateRequest request;
    request.set_text(std::string(2000, 'x'));
    request.set_request_id("mine");
    grpc::ClientContext context;
    auto reader = stub->GenerateStream(&context, request);
    v1::GenerateChunk chunk;
    ASSERT_TRUE(reader->Read(&chunk));
    EXPECT_EQ(abort(by_name ? "mine" : chunk.id()), 1u);
    while (reader->Read(&chunk)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(scheduler.wait_cancelled(2));
  v1::AbortResponse response;
  grpc::ClientContext context;
  EXPECT_EQ(stub->Abort(&context, {}, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(GrpcTest, BytesThatAreNoMessageAreInvalid) {
  for (const char* method :
       {"Generate", "GenerateStream", "Chat", "ChatStream", "Tokenize", "Detokenize", "Abort", "ModelInfo"}) {
    for (const std::string& bytes : {std::string("\xff\xff\xff\xff"),
                                     std::string("\x0a\x05"
                                                 "ab"),
                                     std::string("\x0a\x01\xff")}) {  // the last: a string that is no UTF-8
      if (std::string(method) == "ModelInfo" && bytes[0] == '\x0a' && bytes[1] == '\x01')
        continue;  // an unknown field
      std::string answer;
      const grpc::Status status =
          generic_call(channel, std::string("/conclave.v1.Inference/") + method, bytes, &answer);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
          << method << ": " << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr("message"));
    }
  }
  std::string answer;
  EXPECT_EQ(generic_call(channel, "/conclave.v1.Inference/Nothing", "", &answer).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace conclave::router
