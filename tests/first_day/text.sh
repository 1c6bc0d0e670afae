# A text classifier of transformers, on the command line: the folder that save_pretrained writes.
cat > make_folder.py << 'END'
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
config = RobertaConfig(vocab_size=300, max_position_embeddings=66, num_labels=3, **sizes)
RobertaForSequenceClassification(config).save_pretrained("my-roberta")
END
python make_folder.py
exir-lower plan my-roberta/ -p xnnpack
exir-lower lower my-roberta/ -p xnnpack -o text.pte
exir-lower inspect text.pte | grep "takes input_ids: int64"
exir-lower inspect text.pte | grep "returns logits: float32"
exir-lower run text.pte
exir-lower verify text.pte my-roberta/
