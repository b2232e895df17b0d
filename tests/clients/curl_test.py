"""curl against a running cluster: what goes over the wire, byte for byte."""

import json
import subprocess
import unittest

from clients import MODEL, SERVERS


def curl(path, body=None, *options):
    command = ["curl", "--silent", "--show-error", "--max-time", "60", "--noproxy", "*", *options]
    if body is not None:
        command += ["--data-binary", "@-"]
    done = subprocess.run(command + [f"http://{SERVERS['http']}{path}"], input=None if body is None else json.dumps(body),
                          capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Curl(unittest.TestCase):
    def test_models_and_health(self):
        self.assertEqual(json.loads(curl("/v1/models"))["data"][0]["id"], MODEL)
        escaped = "".join(f"%{byte:02X}" for byte in MODEL.encode())
        self.assertEqual(json.loads(curl(f"/v1/models/{escaped}"))["id"], MODEL)
        self.assertEqual(curl("/health", None, "--output", "/dev/null", "--write-out", "%{http_code}"), "200")

    def test_a_stream_is_events_and_ends_with_done(self):
        text = curl("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True,
            "stream_options": {"include_usage": True}}, "--no-buffer")
        events = text.split("\n\n")
        self.assertEqual(events[-2:], ["data: [DONE]", ""])
        documents = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        self.assertEqual(documents[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        self.assertEqual(documents[-1]["choices"], [])
        self.assertEqual(documents[-1]["usage"]["completion_tokens"], 5)
        self.assertEqual(sum(1 for d in documents if d["choices"] and d["choices"][0]["finish_reason"]), 1)

    def test_tokenize_and_back(self):
        tokens = json.loads(curl("/tokenize", {"prompt": "Once upon a time"}))
        self.assertEqual(tokens["count"], len(tokens["tokens"]))
        self.assertEqual(json.loads(curl("/detokenize", {"tokens": tokens["tokens"]}))["prompt"], "Once upon a time")
        chat = json.loads(curl("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}))
        self.assertTrue(json.loads(curl("/detokenize", {"tokens": chat["tokens"]}))["prompt"].endswith("<think>\n"))

    def test_errors_are_json_that_names_the_field(self):
        for path, body, status, param in [
            ("/v1/completions", {"prompt": "a", "temperature": -1}, "400", "temperature"),
            ("/v1/completions", {}, "400", "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 0}, "400", "n"),
            ("/v1/completions", {"prompt": "a", "model": "other"}, "404", "model"),
            ("/v1/nothing", {}, "404", None),
        ]:
            text, code = curl(path, body, "--write-out", "\n%{http_code}").rsplit("\n", 1)
            self.assertEqual(code, status)
            self.assertEqual(json.loads(text)["error"]["param"], param)


if __name__ == "__main__":
    unittest.main()
