"""Public clients against a running router: the openai package, and gRPC through reflection alone."""

import os
import threading
import unittest

import grpc
import openai
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

MODEL = "tiny-m2"


def new_client():
    return openai.OpenAI(base_url=f"http://{os.environ['CONCLAVE_HTTP']}/v1", api_key="none", max_retries=0)


class OpenAiCompletions(unittest.TestCase):
    def setUp(self):
        self.client = new_client()

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], [MODEL])
        self.assertEqual(self.client.models.retrieve(MODEL).id, MODEL)
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("another")

    def test_whole_and_streamed_are_equal(self):
        asked = dict(model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=0)
        whole = self.client.completions.create(**asked)
        self.assertIn(whole.choices[0].finish_reason, ("stop", "length"))
        self.assertGreater(whole.usage.prompt_tokens, 0)
        self.assertEqual(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens)
        text, finish, usage = "", None, None
        for chunk in self.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            if chunk.usage:
                usage = chunk.usage
            if chunk.choices:
                text += chunk.choices[0].text
                finish = chunk.choices[0].finish_reason or finish
        self.assertEqual(text, whole.choices[0].text)
        self.assertEqual(finish, whole.choices[0].finish_reason)
        self.assertEqual(usage.completion_tokens, whole.usage.completion_tokens)

    def test_token_ids_and_seeds(self):
        asked = dict(model=MODEL, prompt=[10, 20, 30], max_tokens=12, temperature=1.0, seed=5)
        first, second = (self.client.completions.create(**asked) for _ in range(2))
        self.assertEqual(first.usage.prompt_tokens, 3)
        self.assertEqual(first.choices[0].text, second.choices[0].text)

    def test_stop_string(self):
        free = self.client.completions.create(
            model=MODEL, prompt="abc", max_tokens=40, temperature=0, extra_body={"ignore_eos": True})
        text = free.choices[0].text
        stop = text[len(text) // 2:][:2]
        self.assertTrue(stop)
        stopped = self.client.completions.create(
            model=MODEL, prompt="abc", max_tokens=40, temperature=0, stop=[stop], extra_body={"ignore_eos": True})
        self.assertEqual(stopped.choices[0].text, text[:text.index(stop)])
        self.assertEqual(stopped.choices[0].finish_reason, "stop")

    def test_bad_input(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.completions.create(model=MODEL, prompt="a", max_tokens=-3)
        self.assertEqual(caught.exception.param, "max_tokens")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.completions.create(model=MODEL, prompt="")
        self.assertEqual(caught.exception.param, "prompt")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.completions.create(model="another", prompt="a")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.completions.create(model=MODEL, prompt="word " * 100000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")


class OpenAiChat(unittest.TestCase):
    def setUp(self):
        self.client = new_client()
        self.asked = dict(
            model=MODEL,
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Name a colour."},
            ],
            max_completion_tokens=24,
            temperature=0,
        )

    def test_whole_and_streamed_are_equal(self):
        whole = self.client.chat.completions.create(**self.asked)
        self.assertEqual(whole.choices[0].message.role, "assistant")
        text, roles, finish = "", [], None
        for chunk in self.client.chat.completions.create(**self.asked, stream=True):
            delta = chunk.choices[0].delta
            roles += [delta.role] if delta.role else []
            text += delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        self.assertEqual(roles, ["assistant"])
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(finish, whole.choices[0].finish_reason)

    def test_bad_messages(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model=MODEL, messages=[])
        self.assertEqual(caught.exception.param, "messages")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model=MODEL, messages=[{"role": "robot", "content": "x"}])
        self.assertEqual(caught.exception.param, "messages[0].role")

    def test_leaving_early_is_no_trouble(self):
        for _ in range(5):
            stream = self.client.chat.completions.create(**dict(self.asked, max_completion_tokens=500), stream=True)
            next(iter(stream))
            stream.close()
        self.assertTrue(self.client.chat.completions.create(**self.asked).choices)

    def test_sixteen_at_once(self):
        expected = self.client.chat.completions.create(**self.asked).choices[0].message.content
        answers = []

        def ask():
            answers.append(new_client().chat.completions.create(**self.asked).choices[0].message.content)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(answers, [expected] * 16)


class GrpcByReflection(unittest.TestCase):
    def setUp(self):
        self.channel = grpc.insecure_channel(os.environ["CONCLAVE_GRPC"])
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


if __name__ == "__main__":
    unittest.main()
