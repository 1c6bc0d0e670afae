"""Somebody who ships a language model of his own: a prompt and a token method that share a state, which is reset."""

import torch

import exir_lowering


class Retention(torch.nn.Module):
    """A decoder whose memory is a matrix that decays, not a cache of tokens."""

    def __init__(self, words=60, width=32):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        self.head = torch.nn.Linear(width, words)
        self.register_buffer("memory", torch.zeros(width, width))

    def step(self, token):
        x = self.embed(token)
        self.memory.copy_(self.memory * 0.9 + self.key(x).T @ self.value(x))
        return self.head(x + self.query(x) @ self.memory)


class Prompt(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        for place in range(4):
            logits = self.model.step(tokens[:, place])
        return {"logits": logits}


class Token(Prompt):
    def forward(self, token):
        return {"logits": self.model.step(token)}


torch.manual_seed(0)
model = Retention().eval()
prompt, token = Prompt(model).eval(), Token(model).eval()
text = torch.tensor([[3, 1, 4, 1]])
programs = {"prompt": torch.export.export(prompt, (text,)), "token": torch.export.export(token, (text[:, 0],))}
exir_lowering.lower(programs, "xnnpack").emit(constant_methods={"vocabulary": 60}).save("lm.pte")


def generate(run):
    """Return six words after the prompt."""
    words = [run("prompt", tokens=text)["logits"].argmax(-1)]
    while len(words) < 6:
        words.append(run("token", token=words[-1])["logits"].argmax(-1))
    return torch.cat(words).tolist()


loaded = exir_lowering.load("lm.pte")
assert loaded.run("vocabulary") == [60]
first = generate(loaded.run)
loaded.reset()
assert generate(loaded.run) == first
model.memory.zero_()
assert generate(lambda method, **inputs: (prompt if method == "prompt" else token)(**inputs)) == first
print("words", first)
