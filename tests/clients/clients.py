"""What the tests of public clients share: where the servers are, and what they serve."""

import json
import os

import openai

SERVERS = json.loads(os.environ["CONCLAVE_SERVERS"])
MODEL = SERVERS["model"]
TRAINED = SERVERS["trained"]  # the demo checkpoint, which answers with words


def new_client(which="http"):
    return openai.OpenAI(base_url=f"http://{SERVERS[which]}/v1", api_key="none", max_retries=0, timeout=120)


def scripted_client():
    """A client of the model whose words are written in client_server.cc."""
    return new_client("scripted_http")
