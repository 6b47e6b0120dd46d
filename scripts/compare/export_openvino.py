"""A checkpoint folder as an OpenVINO model for OpenVINO GenAI, weights in their own type; run by the peer's Python.

    python export_openvino.py CHECKPOINT FOLDER

Needs openvino, openvino-genai, optimum-intel and torch. GenAI wants a tokenizer even for token ids, so the folder
gets one of a few words that is never asked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel.openvino import OVModelForCausalLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def main() -> int:
    checkpoint, folder = sys.argv[1], Path(sys.argv[2])
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False)
    model.save_pretrained(folder)
    words = Tokenizer(models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, merges=[], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(encoder, folder / "openvino_tokenizer.xml")
    openvino.save_model(decoder, folder / "openvino_detokenizer.xml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
