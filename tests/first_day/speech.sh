# A speech model in a .pt2, on the command line: int8, two methods in one file, inputs from a file.
cat > make_speech.py << 'END'
import torch


class Letters(torch.nn.Module):
    """Convolutions over a spectrum, a GRU cell for each frame in both directions, letters."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Conv1d(16, 24, 3, padding=1)
        self.there, self.back = torch.nn.GRUCell(24, 12), torch.nn.GRUCell(24, 12)
        self.letter = torch.nn.Linear(24, 28)

    def forward(self, spectrum):
        frames = self.features(spectrum).relu().unbind(-1)
        there, back = [torch.zeros(1, 12)], [torch.zeros(1, 12)]
        for one, other in zip(frames, reversed(frames)):
            there.append(self.there(one, there[-1]))
            back.append(self.back(other, back[-1]))
        return {"letters": self.letter(torch.cat([torch.stack(there[1:]), torch.stack(back[:0:-1])], -1))}


torch.manual_seed(0)
model = Letters().eval()
for name, frames in {"long": 4, "short": 2}.items():
    torch.export.save(torch.export.export(model, (torch.randn(1, 16, frames),)), f"{name}.pt2")
torch.save([torch.randn(1, 16, 2)], "sound.pt")
END
python make_speech.py
exir-lower quantize short.pt2 --dynamic -o small.pt2
exir-lower lower long=long.pt2 short=small.pt2 -p xnnpack -o speech.pte
exir-lower verify speech.pte long=long.pt2 short=small.pt2
exir-lower run speech.pte --method short --inputs sound.pt --save letters.pt
exir-lower inspect speech.pte | grep "method short"
