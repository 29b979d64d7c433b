"""The files of adapters: their forms, what is refused before a tensor is read, and the scale."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kestrel_engine.adapters.files import check, find, read
from kestrel_engine.adapters.references import checked_adapter_name
from kestrel_engine.adapters.stored import MAX_HEADER_BYTES, opened_tensors
from kestrel_engine.adapters.targets import targets
from kestrel_engine.errors import AdapterNotFound, AdapterUnfit, CheckpointError, InvalidRequest
from kestrel_engine.models.low_rank import Changes
from kestrel_engine.types.model_config import Family
from tests.engine.adapters.random_adapters import changes, random_tensors
from tests.engine.models.small import small_config

MD2, MD3 = small_config("moondream2"), small_config("moondream3")


def load(folder: Path, name: str = "mine", family: Family = "moondream3") -> Changes:
    model = small_config(family)
    checked = check(find(folder, name), targets(model), model.text)
    return read(checked, torch.float32).weights


def assert_same(got: Changes, expected: Changes) -> None:
    assert got.keys() == expected.keys()
    for module, change in expected.items():
        torch.testing.assert_close(got[module].a, change.a)
        torch.testing.assert_close(got[module].b, change.b)


def as_moondream(tensors: dict[str, Tensor], prefix: str = "text_lora") -> dict[str, Tensor]:
    """The names of Moondream's fine-tunes, for the MLPs of the small Moondream 3: one dense layer, then experts."""
    named = {}
    for name, tensor in tensors.items():
        _, _, layer, _, part, side = name.split(".")
        kind = "dense.0" if layer == "0" else f"moe.{int(layer) - 1}"
        way = "up" if part == "fc1" else "down"
        named[f"{prefix}.{kind}.{way}_{side.lower()}"] = tensor
    return named


def as_variant(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        module, _, side = name.removeprefix("text.blocks.").rpartition(".")
        module = module.replace("attn.qkv", "mixer.Wqkv").replace("attn.proj", "mixer.out_proj")
        named[f"text_model.transformer.h.{module}.parametrizations.weight.0.{side}"] = tensor
    return named


def as_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"base_model.model.{name[:-2]}.lora_{name[-1]}.weight": tensor
        for name, tensor in tensors.items()
    }


def test_canonical_names_change_every_linear_layer_of_text_and_tower(tmp_path: Path) -> None:
    tensors = random_tensors(MD3, 1, vision=True)
    save_file(tensors, tmp_path / "mine.safetensors")
    assert_same(load(tmp_path), changes(tensors))
    assert len(changes(tensors)) == 4 * MD3.text.n_layers + 4 * MD3.vision.enc_n_layers + 2


@pytest.mark.parametrize("prefix", ["text_lora", "_text"])
def test_a_fine_tune_of_moondream(tmp_path: Path, prefix: str) -> None:
    tensors = random_tensors(MD3, 1, only=".mlp.")
    assert checked_adapter_name("01J5@1000") == "01J5@1000"
    torch.save({"lora_state_dict": as_moondream(tensors, prefix)}, tmp_path / "01J5@1000.pt")
    assert_same(load(tmp_path, "01J5@1000"), changes(tensors))


def test_a_fine_tune_that_holds_each_tensor_under_both_names(tmp_path: Path) -> None:
    tensors = random_tensors(MD3, 1, only=".mlp.")
    both = as_moondream(tensors) | as_moondream(tensors, "_text")
    torch.save({"lora_state_dict": both}, tmp_path / "mine.pt")
    assert_same(load(tmp_path), changes(tensors))


def test_a_variant_of_moondream_2(tmp_path: Path) -> None:
    tensors = random_tensors(MD2, 1)
    (tmp_path / "mine").mkdir()
    torch.save(as_variant(tensors), tmp_path / "mine" / "final.pt")
    renamed = {k.replace("proj.", "proj@input."): v for k, v in tensors.items()}
    assert_same(load(tmp_path, family="moondream2"), changes(renamed))


@pytest.mark.parametrize("where", ["folder", "metadata"])
def test_the_scale_is_alpha_by_rank(tmp_path: Path, where: str) -> None:
    tensors = random_tensors(MD2, 1, rank=4)
    if where == "folder":
        (tmp_path / "mine").mkdir()
        save_file(as_peft(tensors), tmp_path / "mine" / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "use_dora": False}
        (tmp_path / "mine" / "adapter_config.json").write_text(json.dumps(described))
    else:
        save_file(tensors, tmp_path / "mine.safetensors", {"alpha": "10"})
    assert_same(load(tmp_path, family="moondream2"), changes(tensors, 2.5))


OFF = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "moondream2", "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 10, "lora_bias": False, "lora_dropout": 0.05,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["fc1", "fc2", "qkv", "proj"],
    "target_parameters": None, "task_type": None, "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""A description as PEFT writes it."""


@pytest.mark.parametrize(
    ("more", "factor", "of_first_fc1"),
    [
        ({}, 2.5, 2.5),
        ({"init_lora_weights": "gaussian"}, 2.5, 2.5),
        ({"use_rslora": True}, 5.0, 5.0),
        ({"alpha_pattern": {"blocks.0.mlp.fc1": 2}}, 2.5, 0.5),
        ({"alpha_pattern": {"^text.blocks.0.mlp.fc1": 6}, "use_rslora": True}, 5.0, 3.0),
        ({"r": 9, "rank_pattern": {r"fc1": 4, "fc2": 4, "qkv": 4, "proj": 4}}, 2.5, 2.5),
        ({"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "blocks"}, 2.5, 2.5),
        ({"exclude_modules": ["lm_head"]}, 2.5, 2.5),
    ],
)
def test_the_descriptions_of_plain_lora(
    tmp_path: Path, more: dict[str, object], factor: float, of_first_fc1: float
) -> None:
    tensors = random_tensors(MD2, 1, rank=4, only="text.")
    (tmp_path / "mine").mkdir()
    save_file(as_peft(tensors), tmp_path / "mine" / "adapter_model.safetensors")
    (tmp_path / "mine" / "adapter_config.json").write_text(json.dumps({**OFF, **more}))
    first = f"{FC1}."
    expected = changes({k: v for k, v in tensors.items() if not k.startswith(first)}, factor)
    expected |= changes({k: v for k, v in tensors.items() if k.startswith(first)}, of_first_fc1)
    assert_same(load(tmp_path, family="moondream2"), expected)


@pytest.mark.parametrize("off", ["false", "False", "none", "null", "", "0", "{}", "[]"])
def test_metadata_are_texts(tmp_path: Path, off: str) -> None:
    tensors = random_tensors(MD2, 1, rank=4)
    described = {"alpha": "8", "rank": "4", "use_dora": off, "format": "pt", "step": "3"}
    save_file(tensors, tmp_path / "mine.safetensors", described | {"use_rslora": off})
    assert_same(load(tmp_path, family="moondream2"), changes(tensors, 2.0))
    save_file(tensors, tmp_path / "mine.safetensors", described | {"use_rslora": "True"})
    assert_same(load(tmp_path, family="moondream2"), changes(tensors, 4.0))
    save_file(tensors, tmp_path / "mine.safetensors", described | {"use_dora": "true"})
    with pytest.raises(AdapterUnfit, match="use_dora' is not supported"):
        load(tmp_path, family="moondream2")
    save_file(tensors, tmp_path / "mine.safetensors", {"alpha": "8", "rank": "8"})
    with pytest.raises(AdapterUnfit, match=r"r is 8 for .*, but .* has rank 4"):
        load(tmp_path, family="moondream2")


def test_the_key_is_the_content(tmp_path: Path) -> None:
    keys = []
    for name, seed, alpha in (("a", 1, "4"), ("same", 1, "4"), ("b", 2, "4"), ("c", 1, "2")):
        tensors = random_tensors(MD3, seed, only=".proj")
        save_file(tensors, tmp_path / f"{name}.safetensors", {"alpha": alpha})
        checked = check(find(tmp_path, name), targets(MD3), MD3.text)
        loaded = read(checked, torch.bfloat16)
        assert loaded.num_bytes == 2 * checked.count
        keys.append(loaded.key)
    assert keys[0] == keys[1] and len(set(keys)) == 3


FC1 = "text.blocks.0.mlp.fc1"
Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({f"{FC1}.A": torch.ones(4, 33)}),
            f"{FC1}.A has the shape [4, 33]; expected [rank, 32] for {FC1} of this model",
        ),
        (
            lambda t: t.update({f"{FC1}.B": torch.ones(47, 4)}),
            f"{FC1}.B has the shape [47, 4]; expected [48, rank]",
        ),
        (
            lambda t: t.update({"text.blocks.1.mlp.fc1.A": torch.ones(4, 32)}),
            "text.blocks.1.mlp.fc1.A has the shape [4, 32]; expected [6, rank, 32]",
        ),
        (lambda t: t.pop(f"{FC1}.B"), f"{FC1}.A has no B beside it"),
        (lambda t: t.pop(f"{FC1}.A"), f"{FC1}.B has no A beside it"),
        (lambda t: t.update({f"{FC1}.A": torch.ones(5, 32)}), "has rank 5, and"),
        (lambda t: t.update({f"{FC1}.A": torch.ones(129, 32)}), "has rank 129; a rank is 1 to 128"),
        (lambda t: t.update({f"{FC1}.A": torch.ones(0, 32)}), "has rank 0; a rank is 1 to 128"),
        (
            lambda t: t.update({f"{FC1}.A": torch.ones(4, 32, dtype=torch.int32)}),
            "is I32; expected",
        ),
        (lambda t: t.update({"text.wte.A": torch.ones(1)}), "text.wte"),
        (lambda t: t.update({"lm_head.bias": torch.ones(1)}), "'lm_head.bias' is no name of an ad"),
        (
            lambda t: t.update({"text.blocks.9.mlp.fc1.A": torch.ones(4, 32)}),
            "text.blocks.9.mlp.fc1, which adapters of this model can't change",
        ),
        (lambda t: t.update({f"model.{FC1}.A": torch.ones(4, 32)}), "mean the same tensor"),
        (lambda t: t.clear(), "holds no tensor"),
        (lambda t: t.update({f"{FC1}.A": torch.full((4, 32), torch.nan)}), "not finite"),
        (
            lambda t: t.update({f"{FC1}.A": torch.full((4, 32), 1e39, dtype=torch.float64)}),
            f"{FC1}.A holds values that are not finite in float32",
        ),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    tensors = random_tensors(MD3, 1, only=".mlp.fc1")
    change(tensors)
    save_file(tensors, tmp_path / "mine.safetensors")
    with pytest.raises(AdapterUnfit) as error:
        load(tmp_path)
    assert message in str(error.value)
    assert str(error.value).startswith("adapter: 'mine' can't be loaded: ")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"use_dora": True}, "use_dora' is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens' is not supported"),
        ({"use_qalora": True}, "use_qalora' is not supported"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config' is not supported"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config' is not supported"),
        ({"bias": "lora_only"}, "bias' is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save' is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices' is not supported"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters' is not supported"),
        ({"a_method_of_tomorrow": 3}, "a_method_of_tomorrow' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported: it may"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16' is not"),
        ({"init_lora_weights": "corda"}, "init_lora_weights 'corda' is not supported"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq' is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' is not supported"),
        ({"init_lora_weights": "eva"}, "init_lora_weights 'eva' is not supported"),
        ({"r": 8}, "r is 8 for text.blocks.0.mlp.fc1, but"),
        ({"r": 4, "rank_pattern": {"fc1": 8}}, "r is 8 for text.blocks.0.mlp.fc1, but"),
        ({"r": 4, "rank_pattern": {"(a*)*fc1": 8}}, "'(a*)*fc1' is a regular expression"),
        ({"r": 4, "alpha_pattern": {"fc1": "x"}}, "alpha_pattern is 'x'; expected a number"),
        ({"r": 4, "alpha_pattern": [1]}, "alpha_pattern must be a JSON object"),
        ({"r": 4, "layers_to_transform": [1]}, "layers_to_transform leaves out text.blocks.0"),
        ({"r": 4, "layers_to_transform": 1}, "layers_to_transform leaves out text.blocks.0"),
        ({"r": 4, "target_modules": ["fc2"]}, "target_modules leaves out text.blocks.0.mlp.fc1"),
        ({"r": 4, "exclude_modules": ["mlp.fc1"]}, "exclude_modules leaves out text.blocks.0"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"lora_alpha": "much"}, "alpha is 'much'; expected a number above 0"),
        ({"lora_alpha": 8, "r": 0}, "rank is 0; expected a number above 0"),
        ({"lora_alpha": 8, "r": 10**400}, "expected a number above 0 and below 1e6"),
        ([], "must be a JSON object"),
        ("{", "is no JSON"),
    ],
)
def test_descriptions_that_are_not_served(tmp_path: Path, described: object, message: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    tensors = as_peft(random_tensors(MD2, 1, rank=4, only=".0.mlp.fc1"))
    save_file(tensors, folder / "adapter_model.safetensors")
    text = described if isinstance(described, str) else json.dumps(described)
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterUnfit) as error:
        load(tmp_path, family="moondream2")
    assert message in str(error.value) and str(tmp_path) not in str(error.value)


def test_broken_files_are_named_without_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00")
    (tmp_path / "code.pt").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    (tmp_path / "empty").mkdir()
    for name in ("cut", "code", "empty"):
        with pytest.raises(AdapterUnfit) as error:
            load(tmp_path, name)
        assert str(tmp_path) not in str(error.value), error.value
        assert "weights_only" not in str(error.value), error.value


def _with_pickle(file: Path, data: bytes) -> None:
    """Writes a file of torch.save whose pickle is ``data``."""
    torch.save({}, file)
    with ZipFile(file) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    with ZipFile(file, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, data if entry.endswith("data.pkl") else content)


def _pickle_of(tensors: object, tmp_path: Path) -> bytes:
    torch.save(tensors, tmp_path / "made")
    with ZipFile(tmp_path / "made") as archive:
        return archive.read("made/data.pkl")


def test_a_pickle_calls_nothing_but_what_makes_tensors(tmp_path: Path) -> None:
    """torch's own unpickler would call ``bytearray(10**12)``."""
    number = b"\x8a\x06" + (10**12).to_bytes(6, "little")
    _with_pickle(tmp_path / "mine.pt", b"\x80\x02cbuiltins\nbytearray\n" + number + b"\x85R.")
    with pytest.raises(AdapterUnfit, match=r"mine\.pt: holds builtins\.bytearray; expected dense"):
        load(tmp_path)


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 32).to_sparse(), torch.empty(4, 32, device="meta")]
)
def test_tensors_that_are_not_in_the_file(tmp_path: Path, tensor: Tensor) -> None:
    torch.save({f"{FC1}.A": tensor}, tmp_path / "mine.pt")
    with pytest.raises(AdapterUnfit, match=r"holds torch\._utils\._rebuild_\w+; expected dense"):
        load(tmp_path)


def test_a_damaged_pickle(tmp_path: Path) -> None:
    whole = _pickle_of(random_tensors(MD3, 1, only=".mlp.fc1"), tmp_path)
    for at in range(20, 400, 20):
        _with_pickle(tmp_path / "mine.pt", whole[:at] + whole[at + 1 :])
        with pytest.raises(AdapterUnfit):
            load(tmp_path)


def test_a_pickle_of_much_else(tmp_path: Path) -> None:
    """It is read as a whole."""
    tensors = random_tensors(MD3, 1, only=".mlp.fc1")
    beside = {"step": 3, "note": b"abc", "dtype": torch.float32}
    torch.save({"lora_state_dict": tensors, **beside}, tmp_path / "mine.pt")
    assert_same(load(tmp_path), changes(tensors))
    optimiser = {"mean": torch.zeros(2 << 20)}
    torch.save({"lora_state_dict": tensors, "optimiser": optimiser}, tmp_path / "mine.pt")
    with pytest.raises(AdapterUnfit, match=r"has \d+ bytes, and the adapter's tensors take \d+"):
        load(tmp_path)


def test_large_headers_are_not_read(tmp_path: Path) -> None:
    size = MAX_HEADER_BYTES + 1
    (tmp_path / "mine.safetensors").write_bytes(size.to_bytes(8, "little") + b"{" + b" " * size)
    _with_pickle(tmp_path / "yours.pt", bytes(size))
    for name in ("mine", "yours"):
        with pytest.raises(AdapterUnfit, match=f"in {size} bytes; the limit is {size - 1}"):
            load(tmp_path, name)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """A thread that waits for a pipe's writer can't be ended."""
    (tmp_path / "mine").mkdir()
    os.mkfifo(tmp_path / "mine" / "adapter_model.safetensors")
    with pytest.raises(AdapterUnfit, match=r"adapter_model\.safetensors: is not a plain file"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, suffix: str) -> None:
    """A process that reads mapped memory beyond the end of its file is killed."""
    file = tmp_path / f"mine.{suffix}"
    tensors = random_tensors(MD3, 1, rank=64)
    save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
    checked = check(find(tmp_path, "mine"), targets(MD3), MD3.text)
    with opened_tensors(checked.found.files) as tensors_of:
        last = list(checked.pairs.values())[-1][1]
        os.truncate(file, 20_000)
        if suffix == "safetensors":
            with pytest.raises(CheckpointError, match="is cut"):
                tensors_of(last)
        else:
            assert tensors_of(last).isfinite().all()
    with pytest.raises(AdapterUnfit):
        read(checked, torch.float32)


def test_a_message_shows_no_control_characters(tmp_path: Path) -> None:
    save_file({"\x1b[31mred" + "d" * 500: torch.ones(1)}, tmp_path / "mine.safetensors")
    with pytest.raises(AdapterUnfit) as error:
        load(tmp_path)
    assert str(error.value).isprintable() and str(error.value).endswith(
        "… is no name of an adapter's tensor"
    )


@pytest.mark.parametrize(
    "name",
    [
        "", "..", "../mine", "/etc/passwd", "a/b/c", "a//b", "a/..", "a/.b", "a/b@", "a/b@../c",
        "http://h/x", ".hidden", "x" * 200, "a@b", "a\0b", "ä",
    ],
)  # fmt: skip
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the name of an adapter"):
        checked_adapter_name(name)


def test_two_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").touch()
    (tmp_path / "mine.safetensors").touch()
    with pytest.raises(AdapterUnfit, match=r"mine\.pt, mine\.safetensors; keep one"):
        find(tmp_path, "mine")
    with pytest.raises(AdapterNotFound, match="there is no adapter 'yours'"):
        find(tmp_path, "yours")
