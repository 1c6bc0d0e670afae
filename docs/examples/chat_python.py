"""Chats with chat.pte in Python. Each argument is what the person says next."""

import sys

import torch

import exir_lowering


class Chat:
    """A chat that goes on: what was said is in the KV cache, so each turn processes its new tokens only."""

    def __init__(self, path):
        self.program = exir_lowering.load(path)
        self.ends = self.program.run("get_eos_ids")
        self.position = 0

    def next_token(self, method, tokens):
        """Run a method on the tokens that come next, and return the most likely token after them."""
        (logits,) = self.program.run(method, torch.tensor([tokens]), torch.tensor([self.position]))
        self.position += len(tokens)
        return int(logits[0, -1].argmax())

    def answer(self, said):
        """Return what the model answers. The end of its last turn was not processed yet: the prompt begins with it."""
        tokens = [self.next_token("forward", list(f"\n> {said}\n< ".encode()))]
        while tokens[-1] not in self.ends:
            tokens.append(self.next_token("step", tokens[-1:]))
        return bytes(tokens[:-1]).decode()


chat = Chat("chat.pte")
for said in sys.argv[1:]:
    print("<", chat.answer(said))
