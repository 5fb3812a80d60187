"""The verifier of lora.yaml and vllm_server.yaml."""


def repeats(prompt, completion):
    """The share of characters that are the prompt's digit: `7>` wants 7777."""
    return completion.count(prompt[0]) / max(1, len(completion))
