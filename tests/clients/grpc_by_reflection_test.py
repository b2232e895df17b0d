"""grpcio against a running cluster, with no generated code: the messages come from reflection."""

import unittest

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from clients import MODEL, SERVERS, new_client


class ByReflection(unittest.TestCase):
    server = "grpc"

    def setUp(self):
        self.channel = grpc.insecure_channel(SERVERS[self.server])
        database = ProtoReflectionDescriptorDatabase(self.channel)
        self.assertIn("conclave.v1.Inference", database.get_services())
        self.assertIn("grpc.health.v1.Health", database.get_services())
        self.pool = descriptor_pool.DescriptorPool(database)
        self.service = self.pool.FindServiceByName("conclave.v1.Inference")

    def tearDown(self):
        self.channel.close()

    def message(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"conclave.v1.{name}"))

    def method(self, name, make):
        found = self.service.methods_by_name[name]
        answer = message_factory.GetMessageClass(found.output_type)
        return make(f"/conclave.v1.Inference/{name}", request_serializer=lambda m: m.SerializeToString(),
                    response_deserializer=answer.FromString)

    def call(self, name, **fields):
        request = self.message(self.service.methods_by_name[name].input_type.name)(**fields)
        return self.method(name, self.channel.unary_unary)(request)


class Inference(ByReflection):
    def test_health(self):
        # The service has no descriptors to reflect; its messages have one field each.
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        service = b"conclave.v1.Inference"
        self.assertEqual(check(b"\x0a" + bytes([len(service)]) + service), b"\x08\x01")  # SERVING

    def test_text_there_and_back(self):
        tokens = self.call("Tokenize", text="Once upon a time")
        self.assertEqual(b"".join(tokens.texts), b"Once upon a time")
        self.assertEqual(self.call("Detokenize", ids=tokens.ids).text, "Once upon a time")

    def test_model_info(self):
        info = self.call("ModelInfo")
        self.assertEqual(info.model, MODEL)
        self.assertTrue(info.ready)
        self.assertTrue(info.has_chat_template)
        self.assertGreater(info.context_length, 0)

    def test_choices_with_logprobs(self):
        answer = self.call("Generate", text="abc", n=2, max_tokens=4, temperature=1, seed=3, ignore_eos=True,
                           logprobs=True, top_logprobs=2, prompt_logprobs=1)
        self.assertEqual([len(choice.logprobs) for choice in answer.choices], [4, 4])
        self.assertEqual(len(answer.choices[0].logprobs[0].top), 2)
        self.assertEqual(len(answer.prompt_logprobs), answer.usage.prompt_tokens - 1)

    def test_usage_says_what_was_cached(self):
        text = "A prompt of a few dozen tokens that nobody else here sends: 8 27 64 125 216 343 512 729 1000. " * 2
        first = self.call("Generate", text=text, max_tokens=2).usage
        self.assertTrue(first.HasField("cached_tokens"))
        self.assertEqual(first.cached_tokens, 0)
        again = self.call("Generate", text=text, max_tokens=2, n=2).usage
        self.assertEqual(again.prompt_tokens, first.prompt_tokens)
        self.assertEqual(again.cached_tokens, (first.prompt_tokens - 1) // 16 * 16)
        self.assertGreater(again.cached_tokens, 0)

    def test_abort(self):
        request = self.message("GenerateRequest")(text="abc", max_tokens=400, ignore_eos=True, request_id="to-abort")
        stream = self.method("GenerateStream", self.channel.unary_stream)(request)
        first = next(stream)
        self.assertEqual(self.call("Abort", id="to-abort").aborted, 1)
        with self.assertRaises(grpc.RpcError) as caught:
            list(stream)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.CANCELLED)
        self.assertEqual(self.call("Abort", id=first.id).aborted, 0)

    def test_a_deadline_that_is_too_short(self):
        request = self.message("GenerateRequest")(text="abc", max_tokens=400, ignore_eos=True)
        with self.assertRaises(grpc.RpcError) as caught:
            self.method("Generate", self.channel.unary_unary)(request, timeout=0.02)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)

    def test_generate_and_stream_are_equal(self):
        request = self.message("GenerateRequest")(text="Once upon a time", max_tokens=24, temperature=0)
        whole = self.method("Generate", self.channel.unary_unary)(request)
        chunks = list(self.method("GenerateStream", self.channel.unary_stream)(request))
        self.assertEqual("".join(chunk.text for chunk in chunks), whole.text)
        self.assertEqual([t for chunk in chunks for t in chunk.token_ids], list(whole.token_ids))
        self.assertEqual(chunks[-1].finish_reason, whole.finish_reason)
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
        # The same answer as over HTTP.
        over_http = new_client().completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=0)
        self.assertEqual(over_http.choices[0].text, whole.text)

    def test_bad_input_names_the_field(self):
        request = self.message("GenerateRequest")(text="a", max_tokens=-1)
        with self.assertRaises(grpc.RpcError) as caught:
            self.method("Generate", self.channel.unary_unary)(request)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("max_tokens", caught.exception.details())
        self.assertIn(("conclave-field", "max_tokens"), [tuple(pair) for pair in caught.exception.trailing_metadata()])


class Chat(ByReflection):
    server = "scripted_grpc"

    def test_a_tool_loop(self):
        tool = dict(name="get_weather", parameters='{"type": "object", "properties": {"city": {"type": "string"}, '
                                                   '"days": {"type": "integer"}, "detail": {"type": "object"}}}')
        messages = [dict(role="user", content="How is the weather?")]
        answer = self.call("Chat", messages=messages, tools=[tool]).choices[0]
        self.assertEqual(answer.finish_reason, "tool_calls")
        self.assertEqual(answer.reasoning_content, "Two calls are needed.")
        self.assertEqual([call.name for call in answer.tool_calls], ["get_weather", "get_weather"])
        chunks = list(self.method("ChatStream", self.channel.unary_stream)(
            self.message("ChatRequest")(messages=messages, tools=[tool])))
        self.assertEqual("".join(chunk.content for chunk in chunks), answer.content)
        self.assertEqual("".join(chunk.reasoning_content for chunk in chunks), answer.reasoning_content)
        pieces = ["", ""]
        for chunk in chunks:
            for delta in chunk.tool_calls:
                pieces[delta.index] += delta.arguments
        self.assertEqual(pieces, [call.arguments for call in answer.tool_calls])
        messages.append(dict(role="assistant", content=answer.content, reasoning_content=answer.reasoning_content,
                             tool_calls=answer.tool_calls))
        messages += [dict(role="tool", tool_call_id=call.id, content="sunny") for call in answer.tool_calls]
        final = self.call("Chat", messages=messages, tools=[tool])
        self.assertEqual(final.choices[0].content, "The answer is sunny.")
        self.assertEqual(final.choices[0].finish_reason, "stop")
        self.assertGreater(final.usage.reasoning_tokens, 0)

    def test_bad_input_names_the_field(self):
        with self.assertRaises(grpc.RpcError) as caught:
            self.call("Chat", messages=[dict(role="robot", content="x")])
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn(("conclave-field", "messages[0].role"),
                      [tuple(pair) for pair in caught.exception.trailing_metadata()])


if __name__ == "__main__":
    unittest.main()
