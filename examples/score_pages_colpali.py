"""Score pages with colpali-engine's model and processor, with its own scores and with this operator.

python examples/score_pages_colpali.py                                   # pages drawn here, a small random ColPali
python examples/score_pages_colpali.py --model vidore/colpali-v1.3 --device cuda --pages scans/*.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from maxsim_kernels import integrations

QUERIES = ("revenue of the second quarter", "how glaciers melt", "safety of trams")
SIGNS = ["<pad>", "<eos>", "<bos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789:.?DQ", "▁", "\n"]


def drawn() -> list[Image.Image]:
    """A page for every question, and two others."""
    pages = []
    for text in (*QUERIES, "an empty annex", "a list of figures"):
        page = Image.new("RGB", (224, 224), "white")
        ImageDraw.Draw(page).text((10, 20), text * 3, fill="black")
        pages.append(page)
    return pages


def random_model() -> tuple[Any, Any]:
    """A small ColPali with random weights, and its processor."""
    from colpali_engine.models import ColPali, ColPaliProcessor
    from transformers import GemmaTokenizer, PaliGemmaConfig, SiglipImageProcessor

    tokenizer = GemmaTokenizer(vocab={sign: number for number, sign in enumerate(SIGNS)}, merges=[], model_max_length=200)
    images = SiglipImageProcessor(size={"height": 56, "width": 56})
    images.image_seq_length = 16
    processor = ColPaliProcessor(image_processor=images, tokenizer=tokenizer)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "gemma", "vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16}
    vision = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, "vision_use_head": False}
    torch.manual_seed(0)
    config = PaliGemmaConfig(
        image_token_index=processor.image_token_id,
        projection_dim=32,
        text_config={**layers, **text, "num_image_tokens": 16, "max_position_embeddings": 512},
        vision_config={**layers, **vision, "projection_dim": 32},
    )
    return ColPali(config), processor


def main() -> None:
    """Encode once, score twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a ColPali of colpali-engine's, id or path (default: a random one)")
    parser.add_argument("--pages", nargs="*", type=Path, help="image files (default: drawn here)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    arguments = parser.parse_args()

    if arguments.model:
        from colpali_engine.models import ColPali, ColPaliProcessor

        model: Any = ColPali.from_pretrained(arguments.model, torch_dtype=torch.bfloat16)
        processor: Any = ColPaliProcessor.from_pretrained(arguments.model)
    else:
        model, processor = random_model()
    model = model.to(arguments.device).eval()
    pages = [Image.open(path).convert("RGB") for path in arguments.pages] if arguments.pages else drawn()

    def tokens(batch: Any) -> list[Tensor]:
        with torch.no_grad():
            return list(model(**batch.to(arguments.device)))

    held = [row for page in pages for row in tokens(processor.process_images([page]))]
    asked = [row for query in QUERIES for row in tokens(processor.process_queries([query]))]

    def scored() -> tuple[Tensor, float]:
        started = time.perf_counter()
        scores = processor.score(asked, held, device=arguments.device)
        return scores, time.perf_counter() - started

    own, own_seconds = min((scored() for _ in range(3)), key=lambda found: found[1])
    with integrations.enable("colpali-engine"):  # the one line
        ours, seconds = min((scored() for _ in range(3)), key=lambda found: found[1])
        calls = dict(integrations.status()["colpali-engine"].calls)
    apart = float((own - ours).abs().max() / own.abs().max())
    print(f"{len(asked)} queries x {len(held)} pages: colpali-engine {own_seconds:.4f} s, with maxsim-kernels {seconds:.4f} s")
    print(f"scores at most {apart:.1e} apart, relative; best pages {ours.argmax(1).tolist()}; scored here: {calls}")
    if not apart <= 2e-2:  # NaN too
        raise SystemExit("the scores are not the same")


if __name__ == "__main__":
    main()
