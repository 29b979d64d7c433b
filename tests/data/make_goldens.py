"""Makes tests/data/goldens from the complete golden set: ``python tests/data/make_goldens.py --from DIR``.

Keeps what the default tests compare with: checkpoints (bf16, compressed), configurations, tokenizer, every case's
generated ids, bins and text, and of the arrays the prefill and region logits of every case, some vision rows, and the
first decode logits of one case a skill. Left out are crops (the checksums in preprocess.json stand for them) and the
readings of the reference that we do not follow. Nothing is rounded: what is kept is kept bit for bit.
"""

import argparse
import json
import lzma
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TARGET = Path(__file__).parent / "goldens"
MODELS = ("md2", "md3")
DECODE_STEPS = 6
"""Decode logits kept of one case a skill; later steps repeat what these show."""
VISION_ROWS = 9
"""Rows kept of the 81 of each picture's embedding and pooled grid."""
NOTE = """> **This folder keeps a part of the set described below**, made by `tests/data/make_goldens.py`: no crops
> (their checksums are in `preprocess.json`), one `tokenizer.json` for both models, `model.bf16.xz` in place of
> `model.safetensors` (`tests/golden/checkpoint.py` unpacks it), fewer rows and steps in `expected.safetensors`.

"""
LEFT_OUT = ("_variant", "_if_post_ln_first", "_pil")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR")
    source: Path = parser.parse_args().source
    copies = ["manifest.json", "preprocess/preprocess.json"]
    copies += [f"images/{path.name}" for path in sorted((source / "images").iterdir())]
    for model in MODELS:
        copies += [f"{model}/{name}" for name in ("config.json", "tensor_names.json")]
    for name in copies:
        _copy(source / name, TARGET / name)
    (TARGET / "README.md").write_text(NOTE + (source / "README.md").read_text())
    tokenizers = {(source / model / "tokenizer.json").read_bytes() for model in MODELS}
    assert len(tokenizers) == 1, "the models' tokenizers differ: keep both"
    (TARGET / "tokenizer.json").write_bytes(tokenizers.pop())
    for model in MODELS:
        expected = json.loads((source / model / "expected.json").read_text())
        arrays = load_file(source / model / "expected.safetensors")
        kept = reduce_arrays(arrays, expected)
        (TARGET / model / "expected.json").write_text(json.dumps(expected) + "\n")
        save_file(kept, TARGET / model / "expected.safetensors")
        checkpoint = load_file(source / model / "model.safetensors")
        (TARGET / model / "model.bf16.xz").write_bytes(pack(checkpoint))
    size = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET}: {size:,} bytes")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def reduce_arrays(arrays: dict[str, Tensor], expected: dict[str, Any]) -> dict[str, Tensor]:
    """The arrays that the default tests read; ``expected["rows"]`` is changed to the rows that are left."""
    rows = expected["rows"]
    picked = list(range(0, len(rows["image_emb_rows"]), len(rows["image_emb_rows"]) // VISION_ROWS))
    decode_cases = first_case_per_skill(expected["cases"])
    kept: dict[str, Tensor] = {}
    for name, array in arrays.items():
        case, _, what = name.rpartition(".")
        if any(part in name for part in LEFT_OUT) or what == "hidden_image_rows":
            continue
        if name.startswith("vision."):
            if what in ("image_emb", "pooled"):
                array, name = array[rows[f"{what}_rows"]], f"{name}_rows"
                what = f"{what}_rows"
            if what in ("image_emb_rows", "pooled_rows"):
                array = array[picked]
            elif what == "crop_features_rows":
                array = array[[0, -1]][:, ::3]
            elif what == "crop_features":
                continue
        elif what in ("decode_logits", "answer_decode_logits"):
            if case not in decode_cases:
                continue
            array = array[:DECODE_STEPS]
        elif ".block" in name and what == "hidden" and case.startswith("query."):
            array = array[-2:]
        kept[name] = array.contiguous().clone()
    for what in ("image_emb_rows", "pooled_rows"):
        rows[what] = [rows[what][i] for i in picked]
    rows["crop_features_rows"] = rows["crop_features_rows"][::3]
    rows["crop_features_crops"] = [0, -1]
    return kept


def first_case_per_skill(cases: list[dict[str, Any]]) -> set[str]:
    """Ids of the first case of each skill."""
    first: dict[str, str] = {}
    for case in cases:
        first.setdefault(case["skill"], case["id"])
    return set(first.values())


def pack(tensors: dict[str, Tensor]) -> bytes:
    """A bf16 checkpoint as xz of: header length, header (JSON: name -> shape, in order), high bytes, low bytes.

    The high bytes (sign and exponent) of all tensors together compress well, the low bytes (mantissa) not at all.
    """
    shapes: dict[str, list[int]] = {}
    planes = []
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, (name, tensor.dtype)
        shapes[name] = list(tensor.shape)
        planes.append(tensor.contiguous().flatten().view(torch.uint8).view(-1, 2))
    both = torch.cat(planes)
    header = json.dumps(shapes).encode()
    low, high = both[:, 0].numpy().tobytes(), both[:, 1].numpy().tobytes()
    return lzma.compress(struct.pack("<I", len(header)) + header + high + low, preset=9)


if __name__ == "__main__":
    main()
