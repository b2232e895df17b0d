"""The openai package against a running cluster: completions and chats."""

import threading
import unittest

import openai

from clients import MODEL, TRAINED, new_client


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

    def test_choices(self):
        asked = dict(model=MODEL, prompt="abc", n=3, max_tokens=12, temperature=1.0, seed=7,
                     extra_body={"ignore_eos": True})
        whole = self.client.completions.create(**asked)
        self.assertEqual([choice.index for choice in whole.choices], [0, 1, 2])
        self.assertEqual(whole.usage.completion_tokens, 36)
        self.assertEqual([c.text for c in self.client.completions.create(**asked).choices],
                         [c.text for c in whole.choices])
        alone = self.client.completions.create(**dict(asked, n=1))
        self.assertEqual(alone.choices[0].text, whole.choices[0].text)
        texts = ["", "", ""]
        for chunk in self.client.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        self.assertEqual(texts, [choice.text for choice in whole.choices])

    def test_several_prompts(self):
        asked = dict(model=MODEL, max_tokens=6, temperature=0)
        both = self.client.completions.create(prompt=["one", "two three"], **asked)
        for choice, prompt in zip(both.choices, ["one", "two three"]):
            self.assertEqual(choice.text, self.client.completions.create(prompt=prompt, **asked).choices[0].text)

    def test_logprobs(self):
        asked = dict(model=MODEL, prompt="Once upon", max_tokens=5, temperature=0, logprobs=3,
                     extra_body={"ignore_eos": True})
        logprobs = self.client.completions.create(**asked).choices[0].logprobs
        self.assertEqual(len(logprobs.tokens), 5)
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
            self.assertLessEqual(logprob, 0)
            self.assertIn(token, top)
            self.assertAlmostEqual(max(top.values()), logprob, places=4)  # greedy
        self.assertEqual(logprobs.text_offset[0], 0)

    def test_echo_with_logprobs(self):
        prompt = "Once upon a time"
        answer = self.client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        choice = answer.choices[0]
        self.assertEqual(choice.text, prompt)
        self.assertEqual("".join(choice.logprobs.tokens), prompt)
        self.assertIsNone(choice.logprobs.token_logprobs[0])
        self.assertTrue(all(value <= 0 for value in choice.logprobs.token_logprobs[1:]))
        self.assertEqual(answer.usage.completion_tokens, 0)

    def test_penalties_and_bias(self):
        asked = dict(model=MODEL, prompt=[65, 66, 67], max_tokens=8, temperature=0)
        ids = lambda answer: answer.choices[0].model_extra["token_ids"]
        plain = ids(self.client.completions.create(**asked, extra_body={"return_token_ids": True, "ignore_eos": True}))
        biased = self.client.completions.create(
            **asked, logit_bias={str(plain[0]): -100}, extra_body={"return_token_ids": True, "ignore_eos": True})
        self.assertNotIn(plain[0], ids(biased))
        forced = self.client.completions.create(
            **asked, logit_bias={"70": 100}, extra_body={"return_token_ids": True, "ignore_eos": True})
        self.assertEqual(ids(forced), [70] * 8)
        varied = self.client.completions.create(
            **asked, frequency_penalty=2, presence_penalty=2,
            extra_body={"return_token_ids": True, "ignore_eos": True, "repetition_penalty": 100.0})
        self.assertEqual(len(set(ids(varied))), 8)

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
        text, reasoning, roles, finish = "", "", [], None
        for chunk in self.client.chat.completions.create(**self.asked, stream=True):
            delta = chunk.choices[0].delta
            roles += [delta.role] if delta.role else []
            text += delta.content or ""
            reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            finish = chunk.choices[0].finish_reason or finish
        self.assertEqual(roles, ["assistant"])
        message = whole.choices[0].message
        self.assertEqual(text, message.content)
        self.assertEqual(reasoning, (message.model_extra or {}).get("reasoning_content") or "")
        self.assertEqual(finish, whole.choices[0].finish_reason)

    def test_logprobs(self):
        answer = self.client.chat.completions.create(**self.asked, logprobs=True, top_logprobs=2)
        tokens = answer.choices[0].logprobs.content
        self.assertEqual(len(tokens), answer.usage.completion_tokens)
        for token in tokens:
            self.assertEqual(len(token.top_logprobs), 2)
            self.assertEqual(token.top_logprobs[0].token, token.token)  # greedy
            self.assertGreaterEqual(token.top_logprobs[0].logprob, token.top_logprobs[1].logprob)
        streamed = []
        for chunk in self.client.chat.completions.create(**self.asked, logprobs=True, top_logprobs=2, stream=True):
            if chunk.choices[0].logprobs:
                streamed += chunk.choices[0].logprobs.content
        self.assertEqual([t.token for t in streamed], [t.token for t in tokens])

    @unittest.skipUnless(TRAINED, "a random checkpoint has nothing to say")
    def test_the_demo_model_counts(self):
        answer = self.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Count from 88 to 93."}], temperature=0,
            max_completion_tokens=200)
        for number in range(88, 94):
            self.assertIn(str(number), answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_what_cannot_be_honoured_is_refused_by_name(self):
        for field, value in [("response_format", {"type": "json_object"}), ("tool_choice", "required"),
                             ("modalities", ["audio"])]:
            with self.assertRaises(openai.BadRequestError) as caught:
                self.client.chat.completions.create(**self.asked, **{field: value})
            self.assertIn(field, caught.exception.param)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}])
        self.assertEqual(caught.exception.param, "messages[0].content[0].type")

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
        ask_for = dict(self.asked, extra_body={"reasoning_format": "none"})
        expected = self.client.chat.completions.create(**ask_for).choices[0].message.content
        self.assertTrue(expected)
        answers = []

        def ask():
            answers.append(new_client().chat.completions.create(**ask_for).choices[0].message.content)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(answers, [expected] * 16)


if __name__ == "__main__":
    unittest.main()
