# An image classifier, on the command line: a function that returns the model and its inputs.
cat > net.py << 'END'
import torch


class Net(torch.nn.Module):
    """Two blocks with squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, stride=4)
        self.norm = torch.nn.BatchNorm2d(8)
        self.squeeze = torch.nn.Conv2d(8, 2, 1)
        self.excite = torch.nn.Conv2d(2, 8, 1)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, image):
        x = self.norm(self.stem(image)).relu()
        x = x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return {"scores": self.head(x.mean((2, 3)))}


def make():
    return Net().eval(), (torch.randn(1, 3, 64, 64),)
END
exir-lower plan net.py:make -p xnnpack
exir-lower lower net.py:make -p xnnpack -o net.pte
exir-lower verify net.pte net.py:make
exir-lower run net.pte
exir-lower bench net.pte --runs 3
exir-lower inspect net.pte | grep "takes image: float32"
exir-lower check net.pte --runtime 1.5.1
