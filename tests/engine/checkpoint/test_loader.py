"""Loading from real files: every layout gives the same tensors, every defect one error with the names."""

import json
import logging
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.checkpoint.weights.memory import host_available
from kestrel_engine.errors import CheckpointError, ConfigError, InsufficientMemoryError
from kestrel_engine.types.model_config import Family, parse_model_config
from tests.checkpoint_loading import load_checkpoint

BF16 = torch.bfloat16


def save(folder: Path, tensors, raw=None, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    if raw is not None:
        (folder / "config.json").write_text(json.dumps(raw))
    if name.endswith(".safetensors"):
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def same(got, wanted, dtype: torch.dtype = BF16) -> bool:
    return got.keys() == wanted.keys() and all(
        got[name].dtype == dtype and torch.equal(got[name], tensor.to(dtype))
        for name, tensor in wanted.items()
    )


def test_both_schemes_load_alike_bit_for_bit(
    tmp_path, family: Family, raw_of, config_of, random_of, schemes
):
    wanted = random_of(config_of(family))
    fingerprints = set()
    for name, write in schemes.items():
        loaded = load_checkpoint(save(tmp_path / name, write(wanted), raw_of(family)), dtype=BF16)
        assert same(loaded.tensors, wanted)
        assert loaded.config == config_of(family)
        fingerprints.add(loaded.fingerprint)
    assert len(fingerprints) == 1 and len(fingerprints.pop()) == 64


def test_the_stored_reference_loads_under_its_other_names(tmp_path, golden_folder, golden_names):
    for model in ("md2", "md3"):
        folder = golden_folder(model)
        stored = load_file(folder / "model.safetensors")
        other = {
            entry["other_layout"]: stored[entry["name"]].t()
            if "other_layout_is" in entry
            else stored[entry["name"]]
            for entry in golden_names(model)
        }
        raw = json.loads((folder / "config.json").read_text())
        left = load_checkpoint(folder)
        right = load_checkpoint(save(tmp_path / model, other, raw))
        assert same(right.tensors, left.tensors, torch.float32)
        assert right.fingerprint == left.fingerprint


def test_shards_and_torch_files_equal_the_single_file(
    tmp_path, family: Family, raw_of, config_of, random_of, schemes
):
    wanted = random_of(config_of(family))
    raw, stored = raw_of(family), schemes["a"](wanted)
    names = sorted(stored)
    halves = {"left.safetensors": names[::2], "right.safetensors": names[1::2]}
    sharded = tmp_path / "sharded"
    for file, part in halves.items():
        save(sharded, {n: stored[n] for n in part}, raw, file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    nested = {"epoch": 3, "model": schemes["b"](wanted), "optimizer": {"lr": 0.1}}
    dump = {"model_state_dict": schemes["b"](wanted), "step": 3}
    sources = [
        save(tmp_path / "single", stored, raw),
        sharded,
        sharded / "model.safetensors.index.json",
        save(tmp_path / "pt", stored, raw, "anything.pt"),
        save(tmp_path / "nested", nested, raw, "weights.pth") / "weights.pth",
        save(tmp_path / "dump", dump, raw, "final.pt"),
    ]
    loaded = [load_checkpoint(source, dtype=BF16) for source in sources]
    assert all(same(one.tensors, wanted) for one in loaded)
    assert len({one.fingerprint for one in loaded}) == 1
    assert len(loaded[1].files) == 2


def test_target_dtype_and_progress(tmp_path, config_of, random_of, raw_of):
    wanted = random_of(config_of("moondream2"))
    folder = save(tmp_path / "m", wanted, raw_of("moondream2"))
    seen: list[tuple[int, int, str]] = []
    loaded = load_checkpoint(folder, progress=lambda *report: seen.append(report))
    assert same(loaded.tensors, wanted, torch.float32)
    total = 4 * sum(t.numel() for t in wanted.values())
    assert seen[-1][:2] == (total, total)
    assert {name for _, _, name in seen} == set(wanted)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_fp8_experts_are_dequantised_exactly_and_fused_tau_is_split(
    tmp_path, caplog, config_of, random_of, raw_of, schemes
):
    config = config_of("moondream3")
    wanted = random_of(config)
    stored = schemes["b"](wanted)
    generator = torch.Generator().manual_seed(3)
    for layer in range(config.text.n_layers):
        head = f"text_model.transformer.h.{layer}"
        canonical = f"text.blocks.{layer}"
        stored[f"{head}.tau_wqwv"] = torch.cat(
            [stored.pop(f"{head}.tau_wq"), stored.pop(f"{head}.tau_wv")]
        )
        if layer < config.text.moe.start_layer:
            continue
        for leaf, weight, scale in (
            ("fc1", "mlp.experts.weight", "up_scale"),
            ("fc2", "mlp.output_experts.weight", "down_scale"),
        ):
            eight_bit = stored[f"{head}.{weight}"].to(torch.float8_e4m3fn)
            scales = torch.rand(eight_bit.shape[:2], generator=generator) + 0.1
            stored[f"{head}.{weight}"] = eight_bit
            stored[f"{head}.moe_quant.{scale}"] = scales
            wanted[f"{canonical}.mlp.{leaf}.weight"] = eight_bit.float() * scales[..., None]
        stored[f"{head}.freqs_cis"] = torch.ones(1)
    raw = raw_of("moondream3")
    for name in ("model_fp8.pt", "model.safetensors"):
        folder = save(tmp_path / name, stored, raw, name)
        loaded = load_checkpoint(folder)
        assert same(loaded.tensors, wanted, torch.float32)
        assert len(loaded.ignored) == 2 and "freqs_cis" in loaded.ignored[0]
        assert same(load_checkpoint(folder, dtype=BF16).tensors, wanted)
    scale = "text_model.transformer.h.1.moe_quant.down_scale"
    del stored[scale]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(save(tmp_path / "noscale", stored, raw))
    assert caught.value.missing == (scale,)


def test_region_ln_is_optional_and_the_log_says_which(
    tmp_path, caplog, config_of, random_of, raw_of
):
    tensors = random_of(config_of("moondream3"))
    caplog.set_level(logging.INFO)
    assert (
        "region.ln.weight"
        in load_checkpoint(save(tmp_path / "a", tensors, raw_of("moondream3"))).tensors
    )
    assert "region.ln: loaded" in caplog.text
    without = {k: v for k, v in tensors.items() if "region.ln" not in k}
    loaded = load_checkpoint(save(tmp_path / "b", without, raw_of("moondream3")))
    assert "region.ln.weight" not in loaded.tensors
    assert "region.ln: absent" in caplog.text


def test_one_error_lists_everything_that_is_wrong(tmp_path, config_of, random_of, raw_of, schemes):
    tensors = random_of(config_of("moondream2"))
    del tensors["text.post_ln.bias"], tensors["vision.blocks.1.mlp.fc2.weight"]
    tensors["text.wte"] = tensors["text.wte"][:, :-1]
    tensors["vision.pos_emb"] = tensors["vision.pos_emb"].to(torch.int8)
    tensors["text.blocks.2.attn.tau_extra"] = torch.zeros(2)
    tensors["vision.patch_emb.bias"][3] = float("nan")
    tensors["text.lm_head.weight"][0, 0] = float("-inf")
    stored = schemes["a"](tensors) | {"stranger": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(save(tmp_path / "m", stored, raw_of("moondream2")))
    error = caught.value
    assert set(error.missing) == {"text.post_ln.bias", "vision.blocks.1.mlp.fc2.weight"}
    assert set(error.unexpected) == {"stranger", "model.text.blocks.2.attn.tau_extra"}
    assert set(error.misshaped) == {"text.wte", "vision.pos_emb"}
    assert set(error.nonfinite) == {"vision.patch_emb.bias", "text.lm_head.weight"}
    message = str(error)
    for name in (*error.missing, *error.unexpected, *error.misshaped, *error.nonfinite):
        assert name in message
    assert "[80, 31] instead of [80, 32]" in message and "I8" in message
    assert "2 missing" in message and "2 non-finite" in message


def test_a_long_list_is_shortened_in_the_message_only(tmp_path, config_of, random_of, raw_of):
    tensors = random_of(config_of("moondream2"))
    kept = {k: v for k, v in tensors.items() if not k.startswith("vision.blocks.")}
    with pytest.raises(CheckpointError, match=r"24 missing: .*, and 14 more$") as caught:
        load_checkpoint(save(tmp_path / "m", kept, raw_of("moondream2")))
    assert len(caught.value.missing) == 24


def test_a_value_that_overflows_the_target_dtype_is_found(tmp_path, config_of, random_of, raw_of):
    tensors = random_of(config_of("moondream2"))
    tensors["text.wte"][0, 0] = 1e6
    folder = save(tmp_path / "m", tensors, raw_of("moondream2"))
    assert load_checkpoint(folder).tensors
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, dtype=torch.float16)
    assert caught.value.nonfinite == ("text.wte",)


def test_without_a_config_names_decide_the_family_and_the_released_shape_is_assumed(
    tmp_path, family: Family, config_of, random_of
):
    tensors = random_of(config_of(family))
    for raw in (None, {"model_type": "moondream1", "config": {}}):
        with pytest.raises(CheckpointError, match=f"released {family} shape was assumed") as caught:
            load_checkpoint(save(tmp_path / f"{raw is None}", tensors, raw))
        assert "text.wte" in caught.value.misshaped


def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path, config_of, random_of, raw_of):
    md2, md3 = (random_of(config_of(f)) for f in ("moondream2", "moondream3"))
    with pytest.raises(ConfigError, match=r"config\.json.*Moondream 2 model"):
        load_checkpoint(save(tmp_path / "a", md2, raw_of("moondream3")))
    raw = raw_of("moondream3")
    raw["config"]["text"]["tau_attn"] = False
    with pytest.raises(ConfigError, match="Moondream 3 model"):
        load_checkpoint(save(tmp_path / "b", md3, raw))


def test_broken_files_are_named(tmp_path, config_of, random_of, raw_of):
    tensors = random_of(config_of("moondream2"))
    good = save(tmp_path / "m", tensors, raw_of("moondream2")) / "model.safetensors"
    data = good.read_bytes()
    whole = save(tmp_path / "p", tensors, None, "model.pt") / "model.pt"
    cases = {
        "cut.safetensors": data[: len(data) // 2],
        "empty.safetensors": b"",
        "noise.safetensors": b"\xff" * 4096,
        "page.safetensors": b"<html>404</html>",
        "cut.pt": whole.read_bytes()[:-5000],
        "noise.pt": b"not a zip" * 100,
        "empty.pth": b"",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(tmp_path / name)
    (tmp_path / "m/config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_checkpoint(good)


class Malicious:
    def __reduce__(self):
        return (print, ("code of the file was run",))


def test_a_torch_file_can_not_run_code(tmp_path, capsys):
    torch.save({"x": Malicious()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        load_checkpoint(tmp_path / "evil.pt")
    assert "code of the file" not in capsys.readouterr().out


def test_folders_without_one_clear_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors"):
        load_checkpoint(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="several checkpoints"):
        load_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, message in (
        ({"x": "../a.safetensors"}, "is not the name"),
        ({"x": "c.safetensors"}, "do not exist: c.safetensors"),
        ([], "not a readable index"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path)


def test_the_fingerprint_changes_with_the_weights(tmp_path, config_of, random_of, raw_of):
    tensors = random_of(config_of("moondream2"))
    raw = raw_of("moondream2")
    first = load_checkpoint(save(tmp_path / "a", tensors, raw)).fingerprint
    assert load_checkpoint(save(tmp_path / "b", tensors, raw), dtype=BF16).fingerprint == first
    tensors["region.coord_encoder.bias"][5] += 1
    changed = load_checkpoint(save(tmp_path / "c", tensors, raw)).fingerprint
    wider = load_checkpoint(save(tmp_path / "d", {k: v.float() for k, v in tensors.items()}, raw))
    assert len({first, changed, wider.fingerprint}) == 3


def test_too_little_memory_is_said_before_anything_is_read(tmp_path, raw_of):
    available = host_available()
    if available is None:
        pytest.skip("this platform does not tell its memory")
    raw = raw_of("moondream2")
    raw["config"]["text"] |= {"n_layers": 30, "ff_dim": available // 1000}
    config = parse_model_config(raw)
    header, offset = {}, 0
    for name, shape in expected_tensors(config).items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        # A hole: the file looks huge and takes no room.
        file.truncate(8 + len(text) + offset)
    seen = []
    with pytest.raises(
        InsufficientMemoryError, match=r"need .* GiB of memory on cpu, .* available"
    ):
        load_checkpoint(tmp_path, config=config, progress=lambda *report: seen.append(report))
    assert not seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gets_the_same_values(
    tmp_path, family: Family, config_of, random_of, raw_of, schemes
):
    wanted = random_of(config_of(family))
    folder = save(tmp_path / "m", schemes["b"](wanted), raw_of(family))
    for dtype in (BF16, torch.float16, torch.float32):
        on_cpu = load_checkpoint(folder, dtype=dtype)
        on_cuda = load_checkpoint(folder, dtype=dtype, device="cuda")
        assert all(tensor.is_cuda for tensor in on_cuda.tensors.values())
        assert same({k: v.cpu() for k, v in on_cuda.tensors.items()}, on_cpu.tensors, dtype)
        assert on_cuda.fingerprint == on_cpu.fingerprint
    wanted["text.wte"][0, 0] = float("nan")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(save(tmp_path / "n", wanted, raw_of(family)), device="cuda")
    assert caught.value.nonfinite == ("text.wte",)
