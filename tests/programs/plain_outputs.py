"""What saved models say to IDS, by plain transformers and peft: argv[1] is a JSON list of [class, folder].

Prints a JSON list: of each, the logits at the last token. Imports nothing of spmdrl.
"""

import json
import sys

import peft
import torch
import transformers

IDS = [[5, 6, 7, 8, 9]]

if __name__ == "__main__":
    outputs = []
    for name, folder in json.loads(sys.argv[1]):
        options = {"num_labels": 1} if name == "AutoPeftModelForSequenceClassification" else {}
        auto = getattr(transformers, name, None) or getattr(peft, name)
        model = auto.from_pretrained(folder, dtype=torch.float32, **options).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(IDS)).logits[0]
        outputs.append((logits if logits.dim() == 1 else logits[-1]).tolist())
        transformers.AutoTokenizer.from_pretrained(folder)("text")
    assert "spmdrl" not in sys.modules
    sys.stdout.write(json.dumps(outputs) + "\n")
