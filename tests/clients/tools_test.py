"""Reasoning and tool calls through the openai package, from a model whose words are known."""

import json
import unittest

import openai

from clients import MODEL, TRAINED, new_client, scripted_client

TOOLS = [{"type": "function", "function": {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "detail": {"type": "object"}}},
}}]
ASKED = [{"role": "user", "content": "How is the weather?"}]


class Tools(unittest.TestCase):
    def setUp(self):
        self.client = scripted_client()

    def ask(self, messages, **more):
        return self.client.chat.completions.create(model="scripted", messages=messages, **{"tools": TOOLS, **more})

    def check_first(self, message, finish):
        self.assertEqual(finish, "tool_calls")
        self.assertEqual(message.content, "One moment.")
        self.assertEqual(message.model_extra["reasoning_content"], "Two calls are needed.")
        arguments = [json.loads(call.function.arguments) for call in message.tool_calls]
        # The schema decides: a number that is declared a string stays one.
        self.assertEqual(arguments, [{"city": "Köln", "days": 3, "detail": {"wind": True}}, {"city": "42"}])
        self.assertEqual(len({call.id for call in message.tool_calls}), 2)

    def finish(self, message):
        messages = ASKED + [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        return self.ask(messages)

    def test_a_loop_to_the_final_answer(self):
        first = self.ask(ASKED)
        self.check_first(first.choices[0].message, first.choices[0].finish_reason)
        self.assertGreater(first.usage.completion_tokens_details.reasoning_tokens, 0)
        final = self.finish(first.choices[0].message)
        self.assertEqual(final.choices[0].message.content, "The answer is sunny.")
        self.assertIsNone(final.choices[0].message.tool_calls)
        self.assertEqual(final.choices[0].finish_reason, "stop")

    def test_the_same_streamed(self):
        with self.client.chat.completions.stream(model="scripted", messages=ASKED, tools=TOOLS) as stream:
            for _ in stream:
                pass
            completion = stream.get_final_completion()
        message = completion.choices[0].message
        self.assertEqual(completion.choices[0].finish_reason, "tool_calls")
        self.assertEqual(message.content, "One moment.")
        whole = self.ask(ASKED).choices[0].message
        self.assertEqual([call.function.arguments for call in message.tool_calls],
                         [call.function.arguments for call in whole.tool_calls])
        self.assertEqual(self.finish(whole).choices[0].message.content, "The answer is sunny.")

    def test_one_call_or_none(self):
        single = self.ask(ASKED, parallel_tool_calls=False)
        self.assertEqual(len(single.choices[0].message.tool_calls), 1)
        none = self.ask(ASKED, tool_choice="none")
        self.assertIsNone(none.choices[0].message.tool_calls)
        self.assertEqual(none.choices[0].finish_reason, "stop")

    def test_reasoning_formats(self):
        hello = [{"role": "user", "content": "Hello"}]
        ask = lambda **body: self.client.chat.completions.create(model="scripted", messages=hello, extra_body=body)
        separate = ask().choices[0].message
        self.assertEqual(separate.content, "Hello from the script.")
        self.assertEqual(separate.model_extra["reasoning"], "It is a greeting.")
        inline = ask(reasoning_format="append").choices[0].message.content
        self.assertTrue(inline.startswith("<think>") and inline.endswith("Hello from the script."), inline)
        raw = ask(reasoning_format="none").choices[0].message.content
        self.assertEqual(raw, "It is a greeting.\n</think>\n\nHello from the script.")
        stopped = self.client.chat.completions.create(model="scripted", messages=hello, stop=[" the script"])
        self.assertEqual(stopped.choices[0].message.content, "Hello from")
        self.assertEqual(stopped.choices[0].finish_reason, "stop")

    def test_bad_tools_and_history(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask(ASKED, tools=[{"type": "function", "function": {}}])
        self.assertEqual(caught.exception.param, "tools[0].function.name")
        broken = {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{broken"}}]}
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask(ASKED + [broken])
        self.assertEqual(caught.exception.param, "messages[1].tool_calls[0].function.arguments")
        with self.assertRaises(openai.BadRequestError):
            self.ask([{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}])


@unittest.skipUnless(TRAINED, "a random checkpoint calls no tools")
class DemoModelTools(unittest.TestCase):
    def test_a_loop_to_the_final_answer(self):
        client = new_client()
        tools = [{"type": "function", "function": {
            "name": "get_weather", "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                           "required": ["city"]}}}]
        asked = dict(model=MODEL, tools=tools, temperature=0, max_completion_tokens=200)
        messages = [{"role": "user", "content": "Give me the weather in Madrid for 5 days."}]
        first = client.chat.completions.create(messages=messages, **asked).choices[0]
        self.assertEqual(first.finish_reason, "tool_calls")
        [call] = first.message.tool_calls
        self.assertEqual(call.function.name, "get_weather")
        self.assertEqual(json.loads(call.function.arguments), {"city": "Madrid", "days": 5})
        messages += [first.message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.id, "content": "Madrid: sunny, 21 degrees"}]
        final = client.chat.completions.create(messages=messages, **asked).choices[0]
        self.assertEqual(final.finish_reason, "stop")
        self.assertIn("Madrid", final.message.content)
        self.assertIn("21", final.message.content)


if __name__ == "__main__":
    unittest.main()
