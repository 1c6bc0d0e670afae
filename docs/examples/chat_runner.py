"""Chats with chat.pte in ExecuTorch's runner. Each argument is what the person says next."""

import sys

from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

runner = TextLLMRunner("chat.pte", "tokenizer.json")
config = GenerationConfig(echo=False, temperature=0.0)
for said in sys.argv[1:]:
    pieces = []
    runner.generate(f"\n> {said}\n< ", config, pieces.append)
    print("<", "".join(pieces).strip(), flush=True)
